"""Budgets of time: what may be typed, and that a run trains exactly the batches that one came to."""

from __future__ import annotations

from typing import Any

import pytest

from runner.failures.errors import WrongKey
from runner.timing.time import Time, TimeUnit, convert
from runner.training.budget import Budget, check_budget, check_length, fitted, unmeasured

CONFIG: dict[str, Any] = {
    "budget": "5m",
    "trainer": {"max_duration": "24ep", "scale_schedule_ratio": 1.0},
}


@pytest.mark.parametrize(
    ("typed", "seconds", "recorded"),
    [
        ("5m", 300, "5m of training"),
        ("1h30m of all", 5400, "1h30m of all"),
        ("90s of evaluation", 90, "90s of evaluation"),
        ("20sec of all = 17ba", 20, "20sec of all = 17ba"),
    ],
)
def test_what_is_typed_is_recorded(typed: str, seconds: float, recorded: str):
    budget = Budget.parse(typed)
    assert budget.seconds == seconds and str(budget) == recorded and Budget.parse(recorded) == budget
    assert Budget.parse(budget.doubled).seconds == 2 * seconds


@pytest.mark.parametrize(
    ("typed", "flop", "recorded"),
    [("1e12flop", 1e12, "1e+12flop"), ("2.5e+09flop = 17ba", 2.5e9, "2.5e+09flop = 17ba")],
)
def test_operations_are_a_budget(typed: str, flop: float, recorded: str):
    budget = Budget.parse(typed)
    assert budget.flop == flop and str(budget) == recorded and Budget.parse(recorded).limit == budget.limit
    assert Budget.parse(budget.doubled).flop == 2 * flop and Budget.parse("5m").flop is None


@pytest.mark.parametrize(
    "typed",
    [
        "5ep",
        "0s",
        "0flop",
        "1e9 flop",
        "1e9flop of all",
        "soon",
        "5m of lunch",
        "5m = ba",
        "",
        True,
    ],
)
def test_anything_else_is_refused(typed: Any):
    with pytest.raises(WrongKey, match="^budget="):
        check_budget({**CONFIG, "budget": typed})


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"scale_schedule_ratio": 0.5}, "trainer.scale_schedule_ratio"),
        ({"max_duration": "10m"}, "trainer.max_duration"),
    ],
)
def test_a_key_that_contradicts_a_budget_is_refused(changed: Any, key: str):
    with pytest.raises(WrongKey, match=f"^{key}="):
        check_budget({**CONFIG, "trainer": CONFIG["trainer"] | changed})
    check_budget({**CONFIG, "budget": None, "trainer": CONFIG["trainer"] | changed})


@pytest.mark.parametrize("duration", ["24ep", "7ep", "1000ba", "1ba"])
@pytest.mark.parametrize("length", [1, 3, 19, 10_007])
def test_a_run_trains_exactly_the_batches_of_its_budget(duration: str, length: int):
    for batches in (*range(1, 60), 999, 19 * 24, 123_457, 10**8 + 1):
        config = {**CONFIG, "trainer": {**CONFIG["trainer"], "max_duration": duration}}
        settled = fitted(config, Budget("5m", batches=batches), length)
        scaled = Time.parse(duration).scaled(settled["trainer"]["scale_schedule_ratio"], length)
        assert convert(scaled, TimeUnit.BATCH, None, length) == batches
        check_length(settled, scaled, length)
        with pytest.raises(WrongKey, match="would now train"):
            check_length(settled, Time(batches + 1, "ba"), length)
        assert unmeasured(settled) == {**config, "budget": "5m of training"}


def test_epochs_of_unknown_length_are_refused():
    with pytest.raises(WrongKey, match="trainer.max_duration='24ep': .* give batches"):
        fitted(CONFIG, Budget("5m", batches=3), None)
