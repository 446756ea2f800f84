"""The command line: compose with Hydra, build, fit, return what a sweep compares.

Exit codes: 0 done; 1 failed in training, with a trace; 2 wrong configuration, one message; 130 on Ctrl-C and 143 on
SIGTERM, after a checkpoint was written.
"""

from __future__ import annotations

import atexit
import datetime
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner import build
from runner.command_line import check_options, merge_repeated, shadowed_packages, with_saved_overrides
from runner.explain import CONFIG_ERRORS, WrongConfig, explain
from runner.launch import Job, Ranks, is_rank_zero

CONF = Path(__file__).resolve().parent.parent / "conf"


def main() -> int:
    """Run the command line of this process, on whatever rank it is; return the exit code."""
    wants_trace = "HYDRA_FULL_ERROR" in os.environ
    os.environ.setdefault(
        "HYDRA_FULL_ERROR", "1"
    )  # lets Hydra hand its errors to us, which prints one message for each
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    ranks = Ranks()
    if not is_rank_zero():
        return follow(ranks)
    code = 1
    try:
        with config_errors():
            shadowed_packages()
            check_options(sys.argv[1:])
            sys.argv[1:] = with_saved_overrides(merge_repeated(sys.argv[1:]))
        code = compose_and_run(ranks)
    except WrongConfig as error:
        if wants_trace:
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # whoever read the output wants no more of it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        traceback.print_exception(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    finally:
        ranks.dismiss(code)
        if not wants_trace:
            del os.environ["HYDRA_FULL_ERROR"]
    return code


def follow(ranks: Ranks) -> int:
    """Run the jobs that rank 0 sends, on any other rank; return the exit code. What all ranks see, rank 0 tells."""
    for job in ranks.receive():
        try:
            run(job)
        except WrongConfig as error:
            if not ranks.hears_more():
                print(f"error on rank {ranks.rank}: {error}", file=sys.stderr)
                return 2
    return 0


def compose_and_run(ranks: Ranks) -> int:
    """Let Hydra compose one job or many, and run each on all ranks."""
    failures: list[Exception] = []
    made: list[Path] = []

    def job(config: DictConfig) -> float | None:
        hydra_config = HydraConfig.get()
        try:
            return run(prepare(config, hydra_config, ranks))
        except Exception as error:
            failures.append(error)
            if hydra_config.mode is RunMode.MULTIRUN:
                raise
            return None

    OmegaConf.register_new_resolver(
        "run_folder", lambda base: make_run_folder(base, made), use_cache=True, replace=True
    )
    try:
        with config_errors():
            # A run's own errors do not pass through Hydra, which would print them in its own way.
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    finally:
        remove_unused(made)
    if failures:
        raise failures[0]
    return 0


@contextmanager
def config_errors(event: str = "") -> Iterator[None]:
    """Turn what a wrong configuration raises into a WrongConfig with one message.

    Args:
        event: only what a hook raises at this event; default: all.
    """
    try:
        yield
    except (WrongConfig, BrokenPipeError):
        raise
    except CONFIG_ERRORS as error:
        if event and not any(f" at {event}," in note for note in getattr(error, "__notes__", [])):
            raise
        raise WrongConfig(explain(error, sys.argv[1:], CONF)) from error


def prepare(config: DictConfig, hydra_config: Any, ranks: Ranks) -> Job:
    """Return the job of a composed config, checked and handed to all ranks."""
    run_dir = Path(hydra_config.runtime.output_dir)
    with removed_when_refused(run_dir), config_errors():
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        plain.pop("experiment", None)
        build.warm_up(plain)
        build.check(plain)
        if plain["resume"] is not None:
            run_dir = run_folder_of(plain["resume"])
    choices = hydra_config.runtime.choices
    name = plain["run_name"] or f"{choices.get('model')}-{choices.get('data')}-{'-'.join(run_dir.parts[-2:])}"
    job = Job(plain, str(run_dir), str(name), list(hydra_config.overrides.task))
    ranks.send(job)
    return job


def run(job: Job) -> float | None:
    """Build a job's Trainer, train, and return what a sweep compares. All ranks."""
    run_dir = Path(job.run_dir)
    with removed_when_refused(run_dir):
        with config_errors():
            trainer = build.build(job.config, run_dir, job.run_name)
        with trainer:
            with config_errors():
                record(trainer, job)
            with config_errors("FIT_START"), build.naming_hooks(job.config):
                trainer.fit()
            return objective(trainer)


def record(trainer: Any, job: Job) -> None:
    """Write down how a run was made, once it is known that it can begin. All ranks."""
    from runner.arguments import check_trainable
    from runner.distributed import get_global_rank
    from runner.record import write_record

    check_trainable(trainer.state)
    if get_global_rank() == 0:
        for path in write_record(Path(job.run_dir), job.config, job.overrides):
            trainer.logger.log_artifact(path, "record")


def objective(trainer: Any) -> float | None:
    """Return the first metric of the first evaluator, for a sweeper to compare; None without one."""
    for values in trainer.state.eval_metric_values.values():
        for value in values.values():
            return float(value)
    return None


def make_run_folder(base: str, made: list[Path]) -> str:
    """Return a new folder `base/<date>/<time>`, made for this run alone, however many start in one second.

    Args:
        base: relative to the working directory.
        made: takes every folder that is made here.

    Raises:
        OSError: it cannot be made.
    """
    now = datetime.datetime.now()
    day = Path(base).absolute() / f"{now:%Y-%m-%d}"
    made += [folder for folder in (day.parent.parent, day.parent, day) if not folder.exists()]
    day.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        folder = day / (f"{now:%H-%M-%S}" if number == 1 else f"{now:%H-%M-%S}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        made.append(folder)
        return str(folder)
    raise OSError(f"no free folder name in {day}")


def remove_unused(made: list[Path]) -> None:
    """Remove those of the folders that nothing came into but Hydra's list of a sweep's overrides."""
    for folder in reversed(made):
        with suppress(OSError):
            if os.listdir(folder) == ["multirun.yaml"]:
                (folder / "multirun.yaml").unlink()
            folder.rmdir()


@contextmanager
def removed_when_refused(run_dir: Path) -> Iterator[None]:
    """On a WrongConfig inside, remove the run's folder, if it was empty before. Rank 0."""
    is_new = is_rank_zero() and run_dir.is_dir() and not any(run_dir.iterdir())
    try:
        yield
    except WrongConfig:
        if is_new:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def run_folder_of(path: str) -> Path:
    """Return the folder of the run that a path names: itself, or the one around a checkpoint."""
    folder = Path(path).absolute()
    return folder.parent.parent if (folder / "manifest.json").exists() else folder


def command() -> NoReturn:
    """Run the command line and end the process.

    Threads are joined, exit handlers run and output is flushed as ever. What is left out is the interpreter's own
    teardown: with torch loaded it takes half a second, and threads of its process groups can abort in it.
    """
    code = main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
