"""One job of a sweep: its name and its folder. Finished jobs are skipped, and interrupted ones are resumed."""

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

from runner.distributed.local_ranks import end_with, is_alive
from runner.distributed.restarts import offered
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
    """Run one job of a sweep; return its objective, `nothing` without one, None if it failed: the other jobs go on."""
    sweep = Sweep.read(hydra_config.sweep.dir)
    leads = sweep.pid == os.getpid()
    if not leads:  # then each process handles signals by itself
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    watched = not leads and sweep.launcher in ("joblib", "submitit_local")  # these run on this machine
    if watched:
        end_with(sweep.pid)
    try:
        if (sweep.folder / STOP).exists() or (watched and not is_alive(sweep.pid)):
            return None
        objective = _repeated(work, sweep.folder / STOP, own_overrides(hydra_config.overrides.task, sweep.fixed))
        return nothing if objective is None else _finite(objective, sweep.directions)
    except WrongConfig as error:
        overrides = list(hydra_config.overrides.task)
        refused = Result("REFUSED", "", "", overrides, wrong_key=error.key)
        refused.error = error_object(WRONG_CONFIG, str(error), error.at, error.allowed, error.fix)
        folder = sweep.folder / f".refused-{hydra_config.job.num}"
        folder.mkdir(exist_ok=True)
        refused.write(folder)
    except Diverged:
        return _finite([math.nan] * max(1, len(sweep.directions)), sweep.directions)
    except Requeued:
        if leads:
            raise
        if sweep.launcher == "submitit_slurm":
            requeue()
    except (JobFailed, SessionOver):
        pass
    except Exception as error:
        print_failure(error)
    except (KeyboardInterrupt, SystemExit):
        if leads:
            raise
    finally:
        if not leads:  # between two jobs nothing needs ending: the next job sees that the sweep was stopped
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    return None


def _repeated(work: Callable[[], Objective], stop: Path, overrides: Sequence[str]) -> Objective:
    """Run one job, and again in the same folder after each failure of the machine that allows it."""
    with offered():
        while True:
            try:
                return work()
            except Restarted as restarted:
                if stop.exists():
                    raise
                print_to_stderr(f"WARNING: {' '.join(overrides)}: {restarted.reason}")  # the job's log has it too


def _finite(objective: float | list[float], directions: Sequence[str]) -> float | list[float]:
    """Return the objectives with NaN replaced by the worst finite value, because an Optuna study stops at NaN."""
    values = objective if isinstance(objective, list) else [objective]
    worst = [-sys.float_info.max if one == "maximize" else sys.float_info.max for one in directions or [""]]
    finite = [bad if math.isnan(value) else value for value, bad in zip(values, itertools.cycle(worst))]
    return finite if len(finite) > 1 else finite[0]


@contextmanager
def placed(job: Job, hydra_config: Any) -> Iterator[tuple[Job, Result | None]]:
    """Yield a sweep's job in its own folder, with its result if there is nothing to do.

    The result is given if the job has finished, or if another process is training it; otherwise it is None. Within the
    context this process has the folder to itself, and what it prints goes to the log in the folder. A new folder is
    removed again if the job is refused.
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
            if result is not None and not is_new:  # so that a signal to the sweep reaches this process
                with suppress(OSError):
                    replace(result, pid=os.getpid(), host=socket.gethostname()).write(folder)
            if (sweep.folder / STOP).exists():  # a signal that came earlier did not reach this process
                if is_new:
                    shutil.rmtree(folder, ignore_errors=True)
                    drop_claim(sweep.folder, key)
                raise SystemExit(128 + signal.SIGTERM)
            with output_to(begin_log(folder)), _failures_logged():
                if not is_new:
                    print(f"== again on {socket.gethostname()}, {datetime.now():%Y-%m-%d %H:%M:%S}", flush=True)
                    job = _resumed(job)
                yield job, None
    except WrongConfig:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
            drop_claim(sweep.folder, key)
        raise
    except JobFailed as failed:
        if (result := read_result(folder)) is not None and result.status == "RUNNING":  # it failed before training
            result.fail(failed.__cause__ or failed)
            result.write(folder)
        raise
    finally:
        if lock is not None:
            lock.close()


@contextmanager
def _failures_logged() -> Iterator[None]:
    """Print the trace of a failure to the job's log, and raise `JobFailed` in its place."""
    try:
        yield
    except (WrongConfig, Diverged):
        raise
    except Exception as error:
        print_failure(error)
        raise JobFailed from error


def _make_folder(sweep_folder: Path, result: Result) -> tuple[Path, bool]:
    """Return the folder of a job, and whether it is new; if another job has the same name, a number is appended."""
    number = 1
    while True:
        folder = sweep_folder / (result.name if number == 1 else f"{result.name}-{number}")
        if not folder.exists() and _make(folder, replace(result, name=folder.name)):
            return folder, True
        if identity_in(folder) == result.identity:
            return folder, False
        number += 1


def _make(folder: Path, result: Result) -> bool:
    """Make a job's folder, which holds its identity from the start; return False if another process was faster."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    aside.mkdir()
    result.write(aside)
    try:
        os.rename(aside, folder)
    except OSError:
        shutil.rmtree(aside)
        if not folder.exists():
            raise
        return False
    return True


def _resumed(job: Job) -> Job:
    """Return an interrupted job, to be resumed from its latest checkpoint, or started over if it has none."""
    from runner.checkpoints.files import find_checkpoint

    try:
        find_checkpoint(job.run_dir)
    except FileNotFoundError:
        shutil.rmtree(Path(job.run_dir) / "checkpoints", ignore_errors=True)
        return job
    return replace(job, resume=job.run_dir, may_be_over=True)
