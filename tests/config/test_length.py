"""A run with a budget trains exactly the batches that the budget allows, and no other key may set its length."""

from __future__ import annotations

from typing import Any

import pytest
from composed_configs import small_experiment

from runner.config.length import check_budget, check_length, fitted, unmeasured
from runner.failures.errors import WrongKey
from runner.timing.time import Time, TimeUnit, convert

TRAINER = {"_target_": "runner.Trainer", "max_duration": "24ep", "scale_schedule_ratio": 1.0}


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"scale_schedule_ratio": 0.5}, "trainer.scale_schedule_ratio"),
        ({"max_duration": "10m"}, "trainer.max_duration"),
    ],
)
def test_a_key_that_contradicts_a_budget_is_refused(changed: Any, key: str):
    with pytest.raises(WrongKey, match=f"^{key}="):
        check_budget(small_experiment(budget="5m", trainer=TRAINER | changed))
    check_budget(small_experiment(trainer=TRAINER | changed))


@pytest.mark.parametrize("duration", ["24ep", "7ep", "1000ba", "1ba"])
@pytest.mark.parametrize("length", [1, 3, 19, 10_007])
def test_a_run_trains_exactly_the_batches_of_its_budget(duration: str, length: int):
    for batches in (*range(1, 60), 999, 19 * 24, 123_457, 10**8 + 1):
        experiment = small_experiment(budget="5m", trainer={**TRAINER, "max_duration": duration})
        settled = fitted(experiment, batches, length)
        scaled = Time.parse(duration).scaled(settled.trainer.get("scale_schedule_ratio"), length)
        assert convert(scaled, TimeUnit.BATCH, None, length) == batches
        check_length(settled, scaled, length)
        with pytest.raises(WrongKey, match="would now train"):
            check_length(settled, Time(batches + 1, "ba"), length)
        assert unmeasured(settled.plain) == {**experiment.plain, "budget": "5m of training"}


def test_epochs_of_unknown_length_are_refused():
    with pytest.raises(WrongKey, match="trainer.max_duration='24ep': .* give batches"):
        fitted(small_experiment(budget="5m", trainer=TRAINER), 3, None)
