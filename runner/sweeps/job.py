"""Run one job of a sweep in its own folder: skip it if it has finished, and resume it if it was interrupted."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.distributed import restarts
from runner.distributed.local_ranks import end_with, is_alive
from runner.distributed.session import end
from runner.distributed.slurm import requeue
from runner.failures.errors import Diverged, JobFailed, Requeued, Restarted, SessionOver, WrongConfig
from runner.failures.exit_codes import WRONG_CONFIG
from runner.files.lock import lock_file
from runner.records.folder import LOG, begin_log
from runner.records.job import Job
from runner.records.listing import LOCK
from runner.records.recording import identify, identity_in
from runner.records.result import Objective, Result, read_result
from runner.records.sweep_jobs import claim, drop_claim
from runner.sweeps.names import name_job, own_overrides
from runner.sweeps.sweep import STOP, Sweep
from runner.terminal.answer import error_object
from runner.terminal.console import print_failure
from runner.terminal.output import output_to
from runner.terminal.text import print_to_stderr


def attempt(work: Callable[[], Objective], hydra_config: Any, nothing: float | None) -> Objective:
    """Run one job of a sweep and return its objective: `nothing` without one, None if the job failed."""
    sweep = Sweep.read(hydra_config.sweep.dir)
    is_leader = sweep.pid == os.getpid()
    if not is_leader:  # each process handles signals itself
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    follows_leader = not is_leader and sweep.launcher in ("joblib", "submitit_local")  # these run on one machine
    if follows_leader:
        end_with(sweep.pid)
    try:
        if (sweep.folder / STOP).exists() or (follows_leader and not is_alive(sweep.pid)):
            return None
        objective = _run_with_restarts(
            work, sweep.folder / STOP, own_overrides(hydra_config.overrides.task, sweep.fixed)
        )
        return nothing if objective is None else _make_finite(objective, sweep.directions)
    except WrongConfig as error:
        overrides = list(hydra_config.overrides.task)
        refused = Result("REFUSED", "", "", overrides, wrong_key=error.key)
        refused.error = error_object(WRONG_CONFIG, str(error), error.at, error.allowed, error.fix)
        folder = sweep.folder / f".refused-{hydra_config.job.num}"
        folder.mkdir(exist_ok=True)
        refused.write(folder)
    except Diverged:
        return _make_finite([math.nan] * max(1, len(sweep.directions)), sweep.directions)
    except Requeued:
        if is_leader:
            raise
        if sweep.launcher == "submitit_slurm":
            requeue()
    except (JobFailed, SessionOver):
        pass
    except Exception as error:
        print_failure(error)
    except (KeyboardInterrupt, SystemExit):
        if is_leader:
            raise
    finally:
        if not is_leader:  # no job is running that a signal could end; the next job sees that the sweep was stopped
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    return None


def _run_with_restarts(work: Callable[[], Objective], stop: Path, overrides: Sequence[str]) -> Objective:
    """Run one job, and restart it in its folder after failures of the machine, as `launch.restarts` allows."""
    with restarts.allowed():
        while True:
            try:
                return work()
            except Restarted as restarted:
                if stop.exists():
                    raise
                print_to_stderr(f"WARNING: {' '.join(overrides)}: {restarted.reason}")  # also in the job's log


def _make_finite(objective: float | list[float], directions: Sequence[str]) -> float | list[float]:
    """Return objectives with NaN replaced by the worst finite value, because an Optuna study stops at NaN."""
    values = objective if isinstance(objective, list) else [objective]
    worst = [sys.float_info.max * (-1 if direction == "maximize" else 1) for direction in directions or [""]]
    finite = [limit if math.isnan(value) else value for value, limit in zip(values, itertools.cycle(worst))]
    return finite if len(finite) > 1 else finite[0]


@contextmanager
def placed(job: Job, hydra_config: Any) -> Iterator[tuple[Job, Result | None]]:
    """Yield a sweep's job with its own folder, and its result if there is nothing to train.

    That is the case if the job has ended, or if another process is training it; otherwise the result is None. Within
    the context this process holds the lock of the folder, and its output goes to the log there. If the job is refused,
    a new folder is removed.
    """
    sweep = Sweep.read(hydra_config.sweep.dir)
    number = hydra_config.job.num
    choices = hydra_config.runtime.choices
    identity = identify(job.experiment.plain)
    tags = {"runner.sweep": sweep.id, "runner.job": str(number), "runner.overrides": " ".join(job.overrides)}
    name = name_job(job.overrides, job.experiment.run_name, sweep.fixed, choices, sweep.number)
    key = sweep.key_of_job(job.overrides)
    folder, is_new = _make_folder(sweep.folder, Result("RUNNING", name, identity, job.overrides))
    claim(sweep.folder, key, folder, identity)
    log = str(folder / LOG)
    job = replace(job, run_name=folder.name, run_dir=str(folder), log=log, tags={**job.tags, **tags})
    lock = lock_file(folder / LOCK)
    result = read_result(folder)
    try:
        if lock is None:
            print(f"skipped {folder.name}: another process is training it", flush=True)
            yield job, result
        elif sweep.is_over(result):
            yield job, result
        else:
            if result is not None and not is_new:  # with the id of this process, to which the sweep forwards signals
                with suppress(OSError):
                    replace(result, pid=os.getpid(), host=socket.gethostname()).write(folder)
            if (sweep.folder / STOP).exists():  # an earlier signal was not sent to this process
                if is_new:
                    shutil.rmtree(folder, ignore_errors=True)
                    drop_claim(sweep.folder, key)
                raise SystemExit(128 + signal.SIGTERM)
            with output_to(begin_log(folder)), _logging_failures():
                if not is_new:
                    print(f"== again on {socket.gethostname()}, {datetime.now():%Y-%m-%d %H:%M:%S}", flush=True)
                    job = _resume(job)
                yield job, None
    except WrongConfig:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
            drop_claim(sweep.folder, key)
        raise
    except JobFailed as error:
        if (result := read_result(folder)) is not None and result.status == "RUNNING":  # it failed before training
            result.fail(error.__cause__ or error)
            result.write(folder)
        raise
    finally:
        if lock is not None:
            lock.close()


@contextmanager
def _logging_failures() -> Iterator[None]:
    """Print the trace of a failure to the job's log, and raise `JobFailed` from it."""
    try:
        yield
    except (WrongConfig, Diverged):
        raise
    except Exception as error:
        print_failure(error)
        raise JobFailed from error


def _make_folder(sweep_folder: Path, result: Result) -> tuple[Path, bool]:
    """Return the folder of a job and whether it is new. If another job has the same name, append a number."""
    number = 1
    while True:
        folder = sweep_folder / (result.name if number == 1 else f"{result.name}-{number}")
        if not folder.exists() and _create(folder, replace(result, name=folder.name)):
            return folder, True
        if identity_in(folder) == result.identity:
            return folder, False
        number += 1


def _create(folder: Path, result: Result) -> bool:
    """Create a job's folder with its result in it; return False if another process was faster."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir()
    result.write(temporary)
    try:
        os.rename(temporary, folder)
    except OSError:
        shutil.rmtree(temporary)
        if not folder.exists():
            raise
        return False
    return True


def _resume(job: Job) -> Job:
    """Return an interrupted job that resumes from its latest checkpoint, or starts over without one."""
    from runner.checkpoints.files import find_checkpoint

    try:
        find_checkpoint(job.run_dir)
    except FileNotFoundError:
        shutil.rmtree(Path(job.run_dir) / "checkpoints", ignore_errors=True)
        return job
    return replace(job, resume=job.run_dir, may_be_over=True)
