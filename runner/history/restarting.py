"""Restarts a run after the machine fails: Slurm requeues the job, or the run restarts on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from runner.checkpoints.manifest import MANIFEST, read_manifest
from runner.distributed import restarts
from runner.distributed.environment import is_rank_zero
from runner.distributed.slurm import check_progress
from runner.failures.errors import RankFailed, Requeued, UnreadableCheckpoint, WrongConfig
from runner.failures.facts import is_of_environment
from runner.files.addresses import without_credentials
from runner.records.job import Job
from runner.terminal.commands import show_command
from runner.terminal.console import print_failure, show_path
from runner.terminal.text import print_to_stderr


@contextmanager
def restarting(job: Job) -> Iterator[None]:
    """Within the context, restart the run if the machine fails, for example if a rank is killed. All ranks.

    Raises:
        Requeued: Slurm should requeue the job, after such a failure or after a signal.
        Restarted: the run should restart on this machine, after such a failure.
        RuntimeError: several attempts of a Slurm job in a row made no progress.
    """
    if not is_rank_zero():
        yield
        return
    run_dir = Path(job.run_dir)
    launch = job.experiment.launch
    before = saved_batch(run_dir)
    restart = partial(_restart, run_dir, launch.restarts)
    try:
        with restarts.restarted_when_ended(restart):
            yield
    except Exception as error:
        if not is_of_environment(error):
            raise
        if launch.requeues:
            print_failure(error)
            check_progress(saved_batch(run_dir) > before)
            raise Requeued(0) from error
        restart(_describe(error))
        raise
    except Requeued:
        check_progress(saved_batch(run_dir) > before)
        raise


def saved_batch(run_dir: Path) -> int:
    """Return the number of batches trained at the newest checkpoint in a run's folder; -1 without a checkpoint."""
    batches = [-1]
    for file in run_dir.glob(f"*/[!.]*/{MANIFEST}"):
        with suppress(OSError, UnreadableCheckpoint):
            batches.append(int(read_manifest(file.parent).timestamp.batch))
    return max(batches)


def _restart(run_dir: Path, limit: int, reason: str) -> None:
    """Restart a run after a failure if any restarts are left, and print the reason and the batch to start from.

    Raises:
        Restarted: the run restarts.
    """
    if not restarts.may_restart():
        return
    batch = saved_batch(run_dir)
    number = restarts.count_failure(str(run_dir), limit, batch)
    if number == 0:
        cause = f"{limit} restarts in a row made no progress" if limit else "launch.restarts=0"
        command = show_command("resume", show_path(run_dir))
        print_to_stderr(f"WARNING: not restarted ({cause}); when the machine works again: {command}")
        return
    start = "the beginning" if batch < 0 else f"batch {batch}"
    reason = without_credentials(f"restart {number} of {limit}, from {start}, because the machine failed: {reason}")
    print_to_stderr(f"WARNING: {reason}")
    raise restarts.Restarted(reason)


def _describe(error: Exception) -> str:
    """Return an error as one line; for another rank's failure, the last line of its traceback that has an exception."""
    if isinstance(error, RankFailed):
        lines = [line for line in error.trace.splitlines() if re.match(r"[\w.]+: ", line)] or error.trace.splitlines()
        return f"rank {error.rank}: {lines[-1]}"
    kind = "" if isinstance(error, WrongConfig) else f"{type(error).__name__}: "
    return f"{kind}{str(error).partition(chr(10))[0]}"
