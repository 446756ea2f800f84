"""Positions a Trainer right before a batch of an earlier run: loads a checkpoint, and retrains the batches in between.

Everything in training is a function of the seed and the batch, so training from a checkpoint to that batch gives the
run's own weights, samples and random numbers, bit for bit. The run's folder is only read.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.checkpoints.history import checkpoint_before
from runner.config.experiment import Experiment
from runner.core.hooks import Callback
from runner.core.logger import Logger
from runner.core.state import State
from runner.distributed.threads import use_threads, with_threads
from runner.failures.errors import WrongKey
from runner.history.optimizer_changes import change_optimizers
from runner.records.record import Record, forked_after
from runner.records.result import read_result
from runner.timing.time import TimeUnit, convert
from runner.training.trainer import Trainer
from runner.trials.dry_run import collecting_warnings
from runner.trials.trial import make_trial, trial


class Stop(Callback):
    """Ends training after a given batch, or after the next one if that batch is already trained."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def fit_start(self, state: State, logger: Logger) -> None:
        self.batch = max(self.batch, state.timestamp.batch + 1)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch >= self.batch:
            state.stop_training()
            for evaluator in state.evaluators:
                evaluator.evaluated_at = state.timestamp.batch  # the end needs no evaluation


@contextmanager
def standing_before(
    experiment: Experiment,
    run: Path,
    batch: int,
    watchers: Mapping[str, Callback],
    *,
    key: str,
    until: int,
    watched: bool = True,
) -> Iterator[Trainer]:
    """Yield a Trainer at the last checkpoint before a batch; its `fit` continues from there. All ranks.

    `fit` ends after the batch `until`. `key` names the batch in errors; without it, the batch may come after the end of
    the run. `watchers` are callbacks to add, by key; the experiment's own run too if `watched`.
    """
    stop = {"stop": Stop(until)}
    with (
        with_threads(Record.of_batch(run, batch).threads, is_requested=True),
        trial(experiment, {**watchers, **stop}, watched=watched, **_start(run, batch, key)) as trainer,
    ):
        change_optimizers(trainer.state, experiment.plain)
        if key:
            check_batch(trainer.state, run, batch, key)
        yield trainer


def stand_before(experiment: Experiment, run: Path, batch: int) -> Trainer:
    """Return a Trainer positioned before a batch; each call of its `fit()` trains one more batch. All ranks.

    From now on, torch uses the same number of CPU threads as in the run.
    """
    if (threads := Record.of_batch(run, batch).threads) is not None:
        use_threads(threads)
    folder = tempfile.TemporaryDirectory(prefix="runner-replay-")
    with collecting_warnings([]):  # the run itself has printed them
        stop = {"stop": Stop(batch - 1)}
        trainer = make_trial(experiment, Path(folder.name, "run"), stop, **_start(run, batch, "batch"))
    weakref.finalize(trainer, folder.cleanup)
    try:
        change_optimizers(trainer.state, experiment.plain)
        check_batch(trainer.state, run, batch, "batch")
        if trainer.state.timestamp.batch < batch - 1:
            trainer.fit()
        check_reached(trainer.state, batch - 1, "batch")
    except BaseException:
        trainer.close()
        raise
    return trainer


def check_batch(state: State, run: Path, batch: int, key: str) -> None:
    """Check that a run does not end before a batch, as far as its end is known.

    Raises:
        WrongKey: it does.
    """
    last = _planned_end(state)
    result = read_result(run)
    if result is not None and result.status in ("FINISHED", "DIVERGED"):
        last = result.batches or last  # training may have been stopped early
    if last is not None and batch > last:
        raise WrongKey(key, f"the last batch of this run is {last}", str(batch))


def check_reached(state: State, batch: int, key: str) -> None:
    """Check that training did not end before a batch was trained; raises as `check_batch` does."""
    if state.timestamp.batch < batch:
        raise WrongKey(key, f"the last batch of this run is {state.timestamp.batch}", str(batch))


def ranks_of(run: Path, batch: int) -> int:
    """Return the number of ranks that trained a batch of a run; 1 if unknown."""
    return Record.of_batch(run, batch).ranks or 1


def _start(run: Path, batch: int, key: str) -> dict[str, Any]:
    """Return the arguments of a Trainer that begins at the last checkpoint before a batch, or at the run's start."""
    checkpoint = checkpoint_before(run, batch)
    if checkpoint is None and (start := forked_after(run)):
        result = read_result(run)
        parent = "" if result is None else f", {result.parent!r}"
        reason = f"this run is a fork that begins after batch {start} of its parent; name the parent{parent}"
        raise WrongKey(key or "RUN", reason, str(batch) if key else repr(str(run)))
    return {} if checkpoint is None else {"resume_path": checkpoint, "load_path": None}


def _planned_end(state: State) -> int | None:
    """Return the batches of the whole run; None if unknown, for example because epochs may differ in length."""
    if state.max_duration.unit is TimeUnit.EPOCH and not hasattr(state.train_dataloader, "order"):
        return None
    try:
        return int(convert(state.max_duration, TimeUnit.BATCH, None, state.train_dataloader_len))
    except ValueError:
        return None


def compare_digests(run: Path, again: Path, start: int, batch: int) -> tuple[bool | None, tuple[str, str]]:
    """Compare the digests of a run with those of the retrained batches.

    Returns:
        Whether they are equal, or None if the run kept none; and a label and a text to print.
    """
    from runner.checkpoints.digest import PARTS, first_difference
    from runner.distributed.ranks import get_world_size

    ranks = ranks_of(run, batch)
    has_same_ranks = ranks == get_world_size()
    try:
        first = first_difference(again, run, PARTS if has_same_ranks else ["samples"])
    except (FileNotFoundError, ValueError):
        text = f"the run kept none of batches {start + 1} to {batch}; +callbacks=state_digest keeps them"
        return None, ("digests", text)
    scope = "" if has_same_ranks else f"samples, on {get_world_size()} of the {ranks} ranks that the run had, "
    if first.batch is None:
        return True, ("ok digests", f"{scope}equal bit for bit up to batch {first.agreed}")
    return False, ("warning digests", f"{scope}different at batch {first.batch}, in {', '.join(first.parts)}")
