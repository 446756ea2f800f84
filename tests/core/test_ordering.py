"""The order of algorithms: declarations are respected, nothing else moves, and contradictions are errors."""

from __future__ import annotations

import itertools

import pytest
from engine_runs import make_trainer

from runner import Algorithm
from runner.core.ordering import order_algorithms


def algorithm(name: str, **declarations: str) -> Algorithm:
    """Return an algorithm of a new class with declarations such as `runs_after`, names separated by spaces."""
    names = {key: {*value.split()} for key, value in declarations.items()}
    return type(name, (Algorithm,), {"close": lambda self, state, logger: None, **names})()


def order(*algorithms: Algorithm) -> str:
    return " ".join(type(ordered).__name__ for ordered in order_algorithms(algorithms))


def test_algorithms_without_declarations_keep_their_order():
    for names in itertools.permutations("PQR"):
        assert order(*map(algorithm, names)) == " ".join(names)


@pytest.mark.parametrize("names", [*itertools.permutations("PQRS")])
def test_declarations_determine_the_order_of_any_permutation(names):
    declarations = {"P": {"runs_after": "S"}, "Q": {"runs_before": "R nobody"}, "R": {"runs_before": "S"}, "S": {}}
    assert order(*(algorithm(name, **declarations[name]) for name in names)) == "Q R S P"


def test_only_algorithms_with_declarations_move():
    assert order(algorithm("P"), algorithm("Q"), algorithm("R", runs_before="P"), algorithm("S")) == "Q R P S"
    assert order(algorithm("P", runs_after="R"), algorithm("Q"), algorithm("R")) == "Q R P"


def test_a_declaration_applies_to_all_instances_of_a_class():
    first, second = algorithm("P"), algorithm("P")
    assert order(first, second, algorithm("Q", runs_before="P")) == "Q P P"
    assert order_algorithms([first, second]) == [first, second]


@pytest.mark.parametrize(
    ("declarations", "cycle"),
    [
        ({"P": {"runs_before": "Q"}, "Q": {"runs_before": "P"}}, "PQ"),
        ({"P": {"runs_before": "Q", "runs_after": "Q"}, "Q": {}}, "PQ"),
        ({"P": {"runs_before": "Q"}, "X": {}, "Q": {"runs_before": "R"}, "R": {"runs_before": "P"}}, "PQR"),
    ],
)
def test_a_cycle_is_an_error_that_names_its_algorithms(declarations: dict, cycle: str):
    with pytest.raises(ValueError, match="form a cycle in runs_before/runs_after: ") as caught:
        order(*(algorithm(name, **names) for name, names in declarations.items()))
    assert {*str(caught.value).partition(": ")[2].split(" -> ")} == {*cycle}


@pytest.mark.parametrize("reverse", [False, True])
def test_a_conflict_declared_by_either_algorithm_is_an_error_that_names_both(reverse: bool):
    pair = [algorithm("P"), algorithm("Q", conflicts_with="P")]
    with pytest.raises(ValueError, match="algorithms 'Q' and 'P' cannot be combined"):
        order_algorithms(pair[::-1] if reverse else pair)
    assert order(pair[1], algorithm("R")) == "Q R"


def test_a_class_can_conflict_with_a_second_instance_of_itself():
    assert order(algorithm("P", conflicts_with="P")) == "P"
    with pytest.raises(ValueError, match="'P' and 'P' cannot be combined"):
        order_algorithms([algorithm("P", conflicts_with="P"), algorithm("P", conflicts_with="P")])


def test_the_trainer_orders_its_algorithms():
    first, second = algorithm("P", runs_after="Q"), algorithm("Q")
    with make_trainer([first, second]) as trainer:
        assert trainer.state.algorithms == (second, first)
    with pytest.raises(ValueError, match="cannot be combined"):
        make_trainer([algorithm("P", conflicts_with="Q"), algorithm("Q")])
