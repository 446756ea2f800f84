"""The key `test`: after training, evaluate the best or the last weights on the test data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.failures.checks import refuse_if
from runner.training.metric_choice import short_name

if TYPE_CHECKING:
    from runner.core.state import State
    from runner.training.evaluator import Evaluator
    from runner.training.trainer import Trainer

log = logging.getLogger("runner")


NO_TEST_DATA = (
    "this run has no test data; let data return (train_loader, eval_loader, test_loader), or an Evaluator with "
    "eval_interval=0; most choices of data have a key for it, such as data.test_samples, data.test_split or "
    "data.test_path"
)


def check_test(state: State, test: str | None, objectives: Iterable[str]) -> None:
    """Check, before training, that there is test data, and that every objective on test data will be measured."""
    untested = {evaluator.label for evaluator in _test_evaluators(state)} if test is None else ()
    for objective in objectives:
        reason = "test data is evaluated only with test=best or test=last; add one"
        refuse_if(short_name(objective).partition("/")[0] in untested, "objective", objective, reason)
    if test is not None:
        check_test_data(state, test)
    if test != "best":
        return
    monitor = _monitor(state)
    if monitor is None:
        raise ValueError(
            "test='best': the best checkpoint needs a metric; add "
            "callbacks.checkpoint_saver.monitor=eval/loss or another metric, or give test=last"
        )
    measured = {evaluator.label for evaluator in state.evaluators if evaluator.is_on}
    label = short_name(monitor).partition("/")[0]
    is_labeled = label in ("train", *(evaluator.label for evaluator in state.evaluators))
    if label != "train" and (label not in measured if is_labeled else not measured):
        raise ValueError(
            f"test='best': the checkpoint is chosen by monitor={monitor!r}, which has no value in training "
            "(its evaluator has eval_interval=0); monitor another metric, or give test=last"
        )


def check_test_data(state: State, test: str) -> None:
    """Check that a run has test data."""
    refuse_if(not _test_evaluators(state), "test", test, NO_TEST_DATA)


def evaluate_test_data(trainer: Trainer, weights: str | None) -> str | None:
    """Evaluate the test data after training, and leave the state of training unchanged. Call it on all ranks.

    Args:
        trainer: the Trainer of the run.
        weights: the weights to test: 'best', 'last', or None for no test.

    Returns:
        The name of the checkpoint that was tested, or 'last'; None if there was no test.
    """
    from runner.distributed.collectives import broadcast_object

    if weights is None:
        return None
    state = trainer.state
    checkpoint: str | None = None
    if weights == "best":
        checkpoints = [getattr(callback, "best_checkpoint", None) for callback in state.callbacks]
        # Only rank 0 writes checkpoints; the others wait here until the best one is written.
        checkpoint = broadcast_object(next((str(path) for path in checkpoints if path is not None), None))
        if checkpoint is None:
            log.warning("test='best': nothing was tested, as monitor=%r was never finite", _monitor(state))
            return None
    values = trainer.eval(_test_evaluators(state), checkpoint)
    tested = "last" if checkpoint is None else Path(checkpoint).name
    trainer.logger.log_tags({"runner.tested": tested})
    _print(values, tested)
    return tested


def _test_evaluators(state: State) -> list[Evaluator]:
    return [evaluator for evaluator in state.evaluators if evaluator.is_test]


def _monitor(state: State) -> str | None:
    """Return the metric by which a callback chooses the best checkpoint; None if no callback chooses one."""
    savers = [callback for callback in state.callbacks if hasattr(callback, "best_checkpoint")]
    return next((saver.monitor for saver in savers if saver.monitor is not None), None)  # type: ignore[attr-defined]


def _print(values: Mapping[str, Mapping[str, Any]], tested: str) -> None:
    from runner.distributed.ranks import get_global_rank
    from runner.terminal.console import print_block
    from runner.training.metrics import scalars

    if get_global_rank() != 0:
        return
    lines = [("weights", tested)]
    for label, metrics in values.items():
        for name, value in metrics.items():
            lines += [(key, f"{float(number):.6g}") for key, number in scalars(f"{label}/{name}", value).items()]
    print_block("test", lines)
