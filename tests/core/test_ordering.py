"""The order of algorithms: what they declare holds, nothing else moves, and what cannot be is an error."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine_runs import make_trainer

from runner import Algorithm
from runner.core.ordering import order_algorithms


def algorithm(name: str, **declared: Any) -> Algorithm:
    declarations = {key: {*value.split()} for key, value in declared.items()}
    return type(name, (Algorithm,), {"close": lambda self, state, logger: None, **declarations})()


def order(*algorithms: Algorithm) -> str:
    return " ".join(type(one).__name__ for one in order_algorithms(algorithms))


def test_without_declarations_the_order_is_as_given():
    for names in itertools.permutations("PQR"):
        assert order(*map(algorithm, names)) == " ".join(names)


@pytest.mark.parametrize("names", [*itertools.permutations("PQRS")])
def test_declarations_hold_in_every_order_in_which_they_may_be_given(names):
    declared = {"P": {"runs_after": "S"}, "Q": {"runs_before": "R nobody"}, "R": {"runs_before": "S"}, "S": {}}
    assert order(*(algorithm(name, **declared[name]) for name in names)) == "Q R S P"


def test_only_what_is_declared_moves():
    assert order(algorithm("P"), algorithm("Q"), algorithm("R", runs_before="P"), algorithm("S")) == "Q R P S"
    assert order(algorithm("P", runs_after="R"), algorithm("Q"), algorithm("R")) == "Q R P"


def test_a_declaration_holds_for_each_of_two_of_a_class():
    first, second = algorithm("P"), algorithm("P")
    assert order(first, second, algorithm("Q", runs_before="P")) == "Q P P"
    assert order_algorithms([first, second]) == [first, second]


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"P": {"runs_before": "Q"}, "Q": {"runs_before": "P"}}, "PQ"),
        ({"P": {"runs_before": "Q", "runs_after": "Q"}, "Q": {}}, "PQ"),
        ({"P": {"runs_before": "Q"}, "X": {}, "Q": {"runs_before": "R"}, "R": {"runs_before": "P"}}, "PQR"),
    ],
)
def test_a_cycle_is_an_error_that_names_it(declared: dict, named: str):
    with pytest.raises(ValueError, match="form a cycle in runs_before/runs_after: ") as raised:
        order(*(algorithm(name, **one) for name, one in declared.items()))
    assert {*str(raised.value).partition(": ")[2].split(" -> ")} == {*named}


@pytest.mark.parametrize("turned", [False, True])
def test_a_conflict_is_an_error_that_names_both_whoever_declares_it(turned: bool):
    pair = [algorithm("P"), algorithm("Q", conflicts_with="P")]
    with pytest.raises(ValueError, match="algorithms 'Q' and 'P' cannot be combined"):
        order_algorithms(pair[::-1] if turned else pair)
    assert order(pair[1], algorithm("R")) == "Q R"


def test_a_class_may_conflict_with_a_second_of_itself():
    assert order(algorithm("P", conflicts_with="P")) == "P"
    with pytest.raises(ValueError, match="'P' and 'P' cannot be combined"):
        order_algorithms([algorithm("P", conflicts_with="P"), algorithm("P", conflicts_with="P")])


def test_the_order_is_settled_when_the_trainer_is_made():
    first, second = algorithm("P", runs_after="Q"), algorithm("Q")
    with make_trainer([first, second]) as trainer:
        assert trainer.state.algorithms == (second, first)
    with pytest.raises(ValueError, match="cannot be combined"):
        make_trainer([algorithm("P", conflicts_with="Q"), algorithm("Q")])
