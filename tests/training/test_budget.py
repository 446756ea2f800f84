"""Parsing of `budget=`, and how a run records it."""

from __future__ import annotations

from typing import Any

import pytest

from runner.failures.errors import WrongKey
from runner.training.budget import Budget


@pytest.mark.parametrize(
    ("typed", "seconds", "recorded"),
    [
        ("5m", 300, "5m of training"),
        ("1h30m of all", 5400, "1h30m of all"),
        ("90s of evaluation", 90, "90s of evaluation"),
        ("20sec of all = 17ba", 20, "20sec of all = 17ba"),
    ],
)
def test_a_budget_of_time_is_parsed_and_can_be_parsed_from_its_record(typed: str, seconds: float, recorded: str):
    budget = Budget.parse(typed)
    assert budget.seconds == seconds and str(budget) == recorded and Budget.parse(recorded) == budget
    assert Budget.parse(budget.doubled).seconds == 2 * seconds


@pytest.mark.parametrize(
    ("typed", "flop", "recorded"),
    [("1e12flop", 1e12, "1e+12flop"), ("2.5e+09flop = 17ba", 2.5e9, "2.5e+09flop = 17ba")],
)
def test_a_budget_of_flop_is_parsed_and_can_be_parsed_from_its_record(typed: str, flop: float, recorded: str):
    budget = Budget.parse(typed)
    assert budget.flop == flop and str(budget) == recorded and Budget.parse(recorded).limit == budget.limit
    assert Budget.parse(budget.doubled).flop == 2 * flop and Budget.parse("5m").flop is None


@pytest.mark.parametrize(
    "typed", ["5ep", "0s", "0flop", "1e9 flop", "1e9flop of all", "soon", "5m of lunch", "5m = ba", "", True]
)
def test_other_budgets_are_refused(typed: Any):
    with pytest.raises(WrongKey, match="^budget="):
        Budget.parse(typed)
