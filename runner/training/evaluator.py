"""Evaluators: a data set to evaluate on, its metrics, and how often to evaluate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner.failures.checks import check_function, check_list, check_subset, refuse_if
from runner.libraries.typed import is_sequence
from runner.timing.time import Interval, Time

if TYPE_CHECKING:
    from runner.core.state import State

Rule = Callable[[Any], Any]
"""A function of the State that returns whether to evaluate now, the same on all ranks.

It is not annotated with State, because a forward reference would prevent type checks of config values.
"""


class Evaluator:
    """A labeled dataloader, with the metrics to compute on it and the interval between evaluations.

    Args:
        label: the name in metric keys, `metrics/{label}/{name}`; not 'train' or 'predict', and without '/'.
        dataloader: the batches to evaluate on. With several ranks, each rank's loader yields its share, so that every
            sample is seen exactly once.
        metric_names: the names of the metrics in `model.metrics(train=False)` to compute; None: all.
        eval_interval: a time string, or a number of epochs; 0: never in training, for test data that is evaluated after
            it (`trainer.eval()`, or the key `test`); None: the Trainer's interval; or a function of the State, called
            after each batch and each epoch, which returns the same on all ranks.
        subset_num_batches: the number of batches after which to stop; None: all batches.

    Raises:
        ValueError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        label: str,
        dataloader: Iterable[Any],
        metric_names: Sequence[str] | None = None,
        eval_interval: str | int | Time | Rule | None = None,
        subset_num_batches: int | None = None,
    ) -> None:
        is_wrong = not label or label in ("train", "predict") or "/" in label
        refuse_if(is_wrong, "label", label, "must be a name without '/', other than 'train' and 'predict'")
        check_subset("subset_num_batches", subset_num_batches)
        check_list("metric_names", metric_names)
        self.label = label
        self.dataloader = dataloader
        self.metric_names = None if metric_names is None else list(metric_names)
        self.eval_interval = None if eval_interval is None else interval_or_rule(eval_interval)
        self.is_test = isinstance(self.eval_interval, Interval) and not self.eval_interval.time.value
        """Whether its own interval is 0: the data is test data, and training never evaluates on it."""
        self.evaluated_at: int | None = None
        """The number of batches trained when this evaluator last ran; None before it has run."""
        self.subset_num_batches = subset_num_batches

    @property
    def is_on(self) -> bool:
        """Whether it runs during training at all."""
        interval = self.eval_interval
        return callable(interval) or (interval is not None and interval.time.value > 0)

    @property
    def runs_mid_epoch(self) -> bool:
        """Whether it can be due after any batch, and not only at the end of an epoch."""
        return not getattr(self.eval_interval, "is_at_epoch_ends", False)

    def is_due(self, state: State) -> bool:
        """Return whether the last advance of time reached a multiple of the interval, or the function returns true."""
        if callable(rule := self.eval_interval):
            return self.evaluated_at != state.timestamp.batch and bool(rule(state))
        return rule is not None and state.is_due(rule)

    def is_owed(self, state: State) -> bool:
        """Return whether it still has to run at the end of training: it is on, and has not run at this batch."""
        return self.is_on and self.evaluated_at != state.timestamp.batch

    def select(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return those of the model's metrics that this evaluator computes.

        Raises:
            ValueError: `metric_names` has a name that is not among the model's metrics.
        """
        if self.metric_names is None:
            return metrics
        for name in self.metric_names:
            if name not in metrics:
                allowed = f"must be among the model's metrics, {[*metrics]}"
                raise ValueError(f"evaluator {self.label!r}: metric_names={name!r}: {allowed}")
        return {name: metrics[name] for name in self.metric_names}


def interval_or_rule(value: str | int | Time | Rule) -> Interval | Rule:
    """Return an interval as an `Interval`, and a function of the State unchanged.

    Raises:
        TypeError: the value is a class, or a function that cannot be called with the State alone.
        ValueError: the value is not a time.
    """
    if not callable(value):
        return Interval(value, name="eval_interval")
    check_function("eval_interval", value, "a time string, or a function of the State, such as lambda state: ...")
    return value


def ensure_evaluators(eval_dataloader: Any, interval: Interval | Rule | None = None) -> list[Evaluator]:
    """Return a list of evaluators from a loader (labeled 'eval'), an Evaluator, a list of Evaluators, or None.

    Evaluators without their own interval get `interval`, if one is given.

    Raises:
        ValueError: two evaluators share a label, the argument is a dict, or a list contains a loader that is not
            wrapped in an Evaluator.
    """
    evaluators = [copy.copy(evaluator) for evaluator in _listed(eval_dataloader)]  # another Trainer may share them
    for evaluator in evaluators:
        evaluator.eval_interval = evaluator.eval_interval or interval
        evaluator.evaluated_at = None
    return evaluators


def with_test(eval_dataloader: Any, test_dataloader: Any) -> list[Evaluator]:
    """Return the evaluators of the evaluation data and the test data in one list.

    Args:
        eval_dataloader: a loader, an Evaluator, a list of Evaluators, or None.
        test_dataloader: a loader, which is evaluated under the label 'test', or an Evaluator with an interval of 0.

    Raises:
        ValueError: the Evaluator of the test data has another interval.
    """
    test = test_dataloader
    if not isinstance(test, Evaluator):
        test = Evaluator("test", test_dataloader, eval_interval=0)
    if not test.is_test:
        raise ValueError(f"evaluator {test.label!r}: test data needs eval_interval=0, so that training does not see it")
    return [*_listed(eval_dataloader), test]


def _listed(eval_dataloader: Any) -> list[Evaluator]:
    if eval_dataloader is None:
        return []
    if isinstance(eval_dataloader, Evaluator):
        return [eval_dataloader]
    items: Sequence[Any] = eval_dataloader if is_sequence(eval_dataloader) else []
    if items and all(isinstance(item, Evaluator) for item in items):
        labels = [item.label for item in items]
        if len({*labels}) < len(labels):
            raise ValueError(f"eval_dataloader: evaluators must have different labels, not {labels}")
        return list(items)
    is_wrong = any(isinstance(item, Evaluator) or hasattr(item, "dataset") or hasattr(item, "order") for item in items)
    if isinstance(eval_dataloader, Mapping) or is_wrong:
        allowed = "a loader, an Evaluator, or a list of Evaluators, each with its label and loader"
        raise ValueError(f"eval_dataloader: must be {allowed}")
    return [Evaluator("eval", eval_dataloader)]
