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
            r"metric_names='Accuracy': must be a list of names, \['Accuracy'\]",
        ),
        ({"label": "a", "eval_interval": "often"}, "eval_interval='often' is not a time"),
        ({"label": "a", "eval_interval": -1}, "eval_interval="),
    ],
)
def test_a_wrong_argument_is_an_error(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Evaluator(**{"dataloader": LOADER, **arguments})


def test_what_the_trainer_takes_becomes_a_list_of_evaluators():
    interval, one, two = Interval("3ba"), Evaluator("one", LOADER), Evaluator("two", LOADER, eval_interval="5ba")
    assert ensure_evaluators(None, interval) == []
    (made,) = ensure_evaluators(LOADER, interval)
    assert (made.label, made.dataloader, made.eval_interval) == ("eval", LOADER, interval)
    (alone,) = ensure_evaluators(one, interval)
    both = ensure_evaluators((one, two), interval)
    assert [vars(alone)] == [vars(one) | {"eval_interval": interval}]
    assert [*map(vars, both)] == [vars(one) | {"eval_interval": interval}, vars(two)]
    assert two.eval_interval == Interval("5ba")
    for several in ([TensorLoader(LOADER[0], batch_size=1, shuffle=False)] * 2, {"a": LOADER}):
        with pytest.raises(ValueError, match="each with its label and loader"):
            ensure_evaluators(several, interval)
    with pytest.raises(ValueError, match="or a list of Evaluators, each with its label"):
        ensure_evaluators([one, LOADER], interval)
    with pytest.raises(ValueError, match=r"must have different labels, not \['one', 'one'\]"):
        ensure_evaluators([one, Evaluator("one", LOADER)], interval)


def test_an_evaluator_takes_the_interval_of_each_trainer_that_it_is_given_to():
    one = Evaluator("one", LOADER)
    intervals = Interval("3ba"), Interval("1ep")
    both = [*ensure_evaluators(one, intervals[0]), *ensure_evaluators(one, intervals[1])]
    assert [made.eval_interval for made in both] == [*intervals]  # neither changes the other's
    both[0].evaluated_at = 7
    assert both[1].evaluated_at is one.evaluated_at is one.eval_interval is None
