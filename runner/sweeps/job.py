"""One job of a sweep: its name and its folder. Finished jobs are skipped, and interrupted ones are resumed."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config.composed import GROUPS, OF_THE_COMMAND
from runner.config.errors import WrongConfig
from runner.distributed.job import Job
from runner.distributed.local_ranks import end_with, is_alive
from runner.distributed.signals import end
from runner.distributed.threads import parallel_jobs
from runner.files.lock import lock_file
from runner.runs.folder import LOCK
from runner.runs.result import Diverged, Result, identify, identity_in, read_result
from runner.sweeps.plan import short_names
from runner.sweeps.sweep import STOP, Sweep
from runner.terminal import print_failure

LONGEST = 100  # characters in a name


def attempt(work: Callable[[], float | None], hydra_config: Any, nothing: float | None) -> float | None:
    """Run one job of a sweep and return its objective, or None if it failed; other jobs continue unless a signal came.

    Args:
        work: runs the job and returns its objective.
        hydra_config: Hydra's config of the job.
        nothing: the value to return if the job has no objective.
    """
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
        objective = _finite(work(), sweep.direction)
        return nothing if objective is None else objective
    except WrongConfig as error:
        overrides = list(hydra_config.overrides.task)
        refused = Result("REFUSED", "", "", overrides, error=str(error), wrong_key=error.key)
        folder = sweep.folder / f".refused-{hydra_config.job.num}"
        folder.mkdir(exist_ok=True)
        refused.write(folder)
    except Diverged as error:
        if sweep.shares_terminal:
            own = own_overrides(list(hydra_config.overrides.task), sweep.fixed)
            print(f"WARNING: {' '.join(own)}: {error}", file=sys.stderr)
        return _finite(math.nan, sweep.direction)
    except Exception as error:
        if sweep.shares_terminal:
            print_failure(error)
    except (KeyboardInterrupt, SystemExit):
        if leads:
            raise
    finally:
        if not leads:  # between two jobs nothing needs ending: the next job sees that the sweep was stopped
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    return None


def label_of(run_name: Any, hydra_config: Any) -> str:
    """Return the prefix for the lines that a job prints: its name if jobs print at the same time, else nothing.

    Args:
        run_name: the configured `run_name`, or None.
        hydra_config: Hydra's config of the job.
    """
    sweep = Sweep.read(hydra_config.sweep.dir)
    if not sweep.shares_terminal or parallel_jobs(hydra_config) == 1:
        return ""
    return name_job(list(hydra_config.overrides.task), run_name, sweep.fixed, hydra_config.runtime.choices)


def _finite(objective: float | None, direction: str) -> float | None:
    """Return the objective, with NaN replaced by the worst finite value, because an Optuna study stops at NaN."""
    if objective is None or objective == objective:
        return objective
    return -sys.float_info.max if direction == "maximize" else sys.float_info.max


@contextmanager
def placed(job: Job, hydra_config: Any) -> Iterator[tuple[Job, Result | None]]:
    """Yield a sweep's job in its own folder, with its result if there is nothing to do.

    The result is given if the job has finished, or if another process is training it; otherwise it is None. Within the
    context this process has the folder to itself. A new folder is removed again if the job is refused.

    Args:
        job: the job as composed.
        hydra_config: Hydra's config of the job.
    """
    sweep = Sweep.read(hydra_config.sweep.dir)
    number = hydra_config.job.num
    choices = hydra_config.runtime.choices
    identity = identify(job.config)
    tags = {"runner.sweep": sweep.id, "runner.job": str(number), "runner.overrides": " ".join(job.overrides)}
    name = name_job(job.overrides, job.config["run_name"], sweep.fixed, choices)
    label = label_of(job.config["run_name"], hydra_config)
    job = replace(job, run_name=name, label=label, tags={**job.tags, **tags})
    folder, is_new = _claim(sweep.folder, Result("RUNNING", job.run_name, identity, job.overrides))
    job = replace(job, run_dir=str(folder))
    lock = lock_file(folder / LOCK)
    result = read_result(folder)
    try:
        if lock is None:
            print(f"skipped {folder.name}: another process is training it", flush=True)
            yield job, result
        elif result is not None and result.status in ("FINISHED", "DIVERGED"):
            before = f"it has already {result.status.lower()}"
            print(f"skipped {folder.name}: {before} (skip_finished=false starts a new sweep)", flush=True)
            yield job, result
        else:
            if result is not None and not is_new:  # so that a signal to the sweep reaches this process
                with suppress(OSError):
                    replace(result, pid=os.getpid(), host=socket.gethostname()).write(folder)
            if (sweep.folder / STOP).exists():  # a signal that came earlier did not reach this process
                if is_new:
                    shutil.rmtree(folder, ignore_errors=True)
                raise SystemExit(128 + signal.SIGTERM)
            yield job if is_new else _resumed(job), None
    except WrongConfig:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except Exception as error:
        if (result := read_result(folder)) is not None and result.status == "RUNNING":  # it failed before training
            result.status = "FAILED"
            result.error = "".join(traceback.format_exception(error))
            result.write(folder)
        raise
    finally:
        if lock is not None:
            lock.close()


def _claim(sweep_folder: Path, result: Result) -> tuple[Path, bool]:
    """Return the folder of a job, and whether it is new; if another job has the same name, a number is appended."""
    number = 1
    while True:
        folder = sweep_folder / (result.name if number == 1 else f"{result.name}-{number}")
        if not folder.exists() and _make(folder, result):
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
    return replace(job, config={**job.config, "resume": job.run_dir}, may_be_over=True)


def name_job(overrides: list[str], run_name: Any, fixed: list[str], choices: Mapping[str, Any]) -> str:
    """Return the name of a job, such as `digits-lr0.01-seed1`: the run's name or its data, then the swept values.

    Args:
        overrides: overrides of the job.
        run_name: the configured `run_name`, or None.
        fixed: keys that are the same for all jobs.
        choices: names chosen in config groups.
    """
    values = swept_values(overrides, fixed)
    prefix = "run_name" if run_name else "data"
    shorts = short_names([*values])
    parts = [str(run_name or choices.get("data") or "own-data")]
    for key in sorted(values):
        if key != prefix:
            parts.append(_labelled("" if key in GROUPS else shorts[key], values[key]))
    name = re.sub(r"[^\w.+-]+", "-", "-".join(parts)).strip("-.") or "job"
    if len(name) > LONGEST:
        name = f"{name[: LONGEST - 7]}-{hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"
    return name


def swept_values(overrides: list[str], fixed: list[str]) -> dict[str, Any]:
    """Return the values that are specific to a job, by key without + and ~."""
    parsed = OverridesParser.create().parse_overrides(own_overrides(overrides, fixed))
    return {one.get_key_element().lstrip("+~"): one.value() for one in parsed}


def own_overrides(overrides: list[str], fixed: list[str]) -> list[str]:
    """Return the overrides that are specific to a job."""
    return [one for one in overrides if one.partition("=")[0] not in (*fixed, *OF_THE_COMMAND)]


def show_value(value: Any) -> str:
    """Return a value as text for names and tables: 0.01, true, null, a+b."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "+".join(show_value(one) for one in value) or "none"
    return str(value)


def _labelled(label: str, value: Any) -> str:
    text = show_value(value)
    return f"{label}_{text}" if label and not re.match(r"[-+.\d]", text) else f"{label}{text}"
