"""Evaluators: their arguments, and how the Trainer makes them from its `eval_dataloader`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner import Evaluator, Interval
from runner.data import TensorLoader
from runner.training.evaluator import ensure_evaluators

LOADER = [torch.zeros(2, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": ""}, "label=''"),
        ({"label": "train"}, "label='train': must be a name without '/', other than 'train' and 'predict'"),
        ({"label": "predict"}, "label='predict'"),
        ({"label": "a/b"}, "label='a/b'"),
        ({"label": "a", "subset_num_batches": 0}, "subset_num_batches=0: must be a whole number, at least 1, or None"),
        (
            {"label": "a", "metric_names": "Accuracy"},
            r"metric_names='Accuracy': must be a list of names, such as \['Accuracy'\]",
        ),
        ({"label": "a", "eval_interval": "often"}, "eval_interval='often' is not a time"),
        ({"label": "a", "eval_interval": -1}, "eval_interval="),
    ],
)
def test_a_wrong_argument_is_an_error(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Evaluator(**{"dataloader": LOADER, **arguments})


def test_a_loader_an_evaluator_or_several_become_a_list_of_evaluators():
    interval, first, second = Interval("3ba"), Evaluator("a", LOADER), Evaluator("b", LOADER, eval_interval="5ba")
    assert ensure_evaluators(None, interval) == []
    (evaluator,) = ensure_evaluators(LOADER, interval)
    assert (evaluator.label, evaluator.dataloader, evaluator.eval_interval) == ("eval", LOADER, interval)
    (single,) = ensure_evaluators(first, interval)
    several = ensure_evaluators((first, second), interval)
    assert vars(single) == vars(first) | {"eval_interval": interval}
    assert [*map(vars, several)] == [vars(first) | {"eval_interval": interval}, vars(second)]
    assert second.eval_interval == Interval("5ba")
    for wrong in ([TensorLoader(LOADER[0], batch_size=1, shuffle=False)] * 2, {"a": LOADER}):
        with pytest.raises(ValueError, match="each with its label and loader"):
            ensure_evaluators(wrong, interval)
    with pytest.raises(ValueError, match="or a list of Evaluators, each with its label"):
        ensure_evaluators([first, LOADER], interval)
    with pytest.raises(ValueError, match=r"must have different labels, not \['a', 'a'\]"):
        ensure_evaluators([first, Evaluator("a", LOADER)], interval)


def test_each_trainer_copies_an_evaluator_and_sets_its_interval_on_the_copy():
    evaluator = Evaluator("eval", LOADER)
    intervals = Interval("3ba"), Interval("1ep")
    copies = [*ensure_evaluators(evaluator, intervals[0]), *ensure_evaluators(evaluator, intervals[1])]
    assert [copy.eval_interval for copy in copies] == [*intervals]
    copies[0].evaluated_at = 7
    assert copies[1].evaluated_at is evaluator.evaluated_at is evaluator.eval_interval is None
