"""Begins a fork with a copy of its parent's checkpoint, or by retraining the parent's batches after an earlier one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from runner.checkpoints.history import read_time
from runner.checkpoints.snapshot import save_checkpoint
from runner.cli.verbs import WATCHING
from runner.core.hooks import Callback
from runner.distributed.environment import is_rank_zero
from runner.files.whole import link_or_copy
from runner.records.job import Job
from runner.records.recording import FORKED_AT, PARENT
from runner.terminal.console import print_block, show_path
from runner.trials.standing import check_reached, compare_digests, standing_before

if TYPE_CHECKING:
    from runner.core.logger import Logger
    from runner.core.state import State

FOLDER = "fork"
"""The subfolder of a fork for the checkpoint that it began with, which stays even if the parent's is removed."""
CURVES = "runner.callbacks.LearningCurves"


class _SaveAt(Callback):
    """Writes a checkpoint after a batch, before anything can stop training there."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch = batch
        self.path = path

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == self.batch:
            save_checkpoint(state, self.path)
            state.stop_training()
            for evaluator in state.evaluators:
                evaluator.evaluated_at = self.batch  # the fork runs evaluations that are due here


def begin_fork(job: Job) -> str:
    """Return the checkpoint that a fork begins with, in the fork's own folder. All ranks.

    If the parent has a checkpoint of that batch, it is copied; the copy shares disk blocks with the original if the
    file system can do that. Otherwise the batches after the parent's last checkpoint are retrained. The fork's
    checkpoint stays when the parent deletes old checkpoints, or is deleted itself.

    Raises:
        WrongKey: the parent has no such batch.
        OSError: the checkpoint cannot be written.
    """
    run_dir = Path(job.run_dir)
    source = None if job.resume is None else Path(job.resume)
    if source is not None and source.is_relative_to(run_dir):
        return str(source)
    batch = int(job.tags[FORKED_AT])
    if source is None or read_time(source).batch != batch:
        return str(_train_trunk(job, Path(job.tags[PARENT]), batch, run_dir / FOLDER / f"ba{batch}"))
    copy = run_dir / FOLDER / source.name
    if is_rank_zero() and not copy.exists():
        partial = copy.with_name(f".{copy.name}.partial-{os.getpid()}")
        shutil.copytree(source, partial, copy_function=link_or_copy)
        partial.rename(copy)
    return str(copy)


def _train_trunk(job: Job, parent: Path, batch: int, path: Path) -> Path:
    """Train a parent from its last checkpoint up to a batch, save it at `path`, and return `path`. All ranks.

    Training repeats that of the parent, on the fork's ranks and device. Of the parent's callbacks, only those of a
    replay run, and its learning curves, which the fork continues.
    """
    assert job.parent is not None
    watchers: dict[str, Callback] = {
        key: callback.make() for key, callback in job.parent.callbacks.items() if callback.target == CURVES
    }
    experiment = job.parent.without_callbacks(WATCHING).on_devices_of(job.experiment)
    # `_SaveAt` ends training itself, a batch before `until`, so that its checkpoint does not tell the fork to end.
    with standing_before(
        experiment, parent, batch, {**watchers, "fork": _SaveAt(batch, path)}, key="BATCH", until=batch + 1
    ) as trainer:
        start = trainer.state.timestamp.batch
        if is_rank_zero():
            again = f"batch {batch} is" if batch == start + 1 else f"batches {start + 1} to {batch} are"
            print_block("", [("parent", f"{show_path(parent)}; its {again} retrained")])
        trainer.fit()
        check_reached(trainer.state, batch, "BATCH")
        if is_rank_zero():
            equal, digests = compare_digests(parent, trainer.state.run_dir, start, batch)
            if equal is not None:
                print_block("", [digests])
    return path
