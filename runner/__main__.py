"""The command line: compose with Hydra, build, fit, return what a sweep compares.

Exit codes: 0 done; 1 failed in training, with a trace; 2 wrong configuration, one message; 130 on Ctrl-C and 143 on
SIGTERM, after a checkpoint was written.
"""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner import build
from runner.command_line import merge_repeated, shadowed_packages
from runner.explain import CONFIG_ERRORS, WrongConfig, explain
from runner.launch import Job, Ranks, is_rank_zero

CONF = Path(__file__).resolve().parent.parent / "conf"


def main() -> int:
    """Run the command line of this process, on whatever rank it is; return the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # lets Hydra hand its errors to us, which prints one message for each
    sys.path.append(os.getcwd())
    ranks = Ranks()
    if not is_rank_zero():
        for job in ranks.receive():
            run(job)
    code = 1
    try:
        with config_errors():
            shadowed_packages()
        sys.argv[1:] = merge_repeated(sys.argv[1:])
        code = compose_and_run(ranks)
    except WrongConfig as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except Exception as error:
        traceback.print_exception(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    finally:
        ranks.dismiss(code)
    return code


def compose_and_run(ranks: Ranks) -> int:
    """Let Hydra compose one job or many, and run each on all ranks."""
    failures: list[Exception] = []

    def job(config: DictConfig) -> float | None:
        hydra_config = HydraConfig.get()
        try:
            return run(prepare(config, hydra_config, ranks))
        except Exception as error:
            failures.append(error)
            if hydra_config.mode is RunMode.MULTIRUN:
                raise
            return None

    OmegaConf.register_new_resolver("run_folder", make_run_folder, use_cache=True, replace=True)
    with config_errors():
        # A run's own errors do not pass through Hydra, which would print them in its own way.
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    if failures:
        raise failures[0]
    return 0


@contextmanager
def config_errors() -> Iterator[None]:
    """Turn what a wrong configuration raises into a WrongConfig with one message."""
    try:
        yield
    except WrongConfig:
        raise
    except CONFIG_ERRORS as error:
        raise WrongConfig(explain(error, sys.argv[1:], CONF)) from error


def prepare(config: DictConfig, hydra_config: Any, ranks: Ranks) -> Job:
    """Return the job of a composed config, checked and handed to all ranks."""
    run_dir = Path(hydra_config.runtime.output_dir)
    with config_errors(), empty_folder_removed(run_dir):
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        plain.pop("experiment", None)
        build.warm_up(plain)
        build.check(plain)
        if plain["resume"] is not None:
            run_dir = run_folder_of(plain["resume"])
    choices = hydra_config.runtime.choices
    name = plain["run_name"] or f"{choices.get('model')}-{choices.get('data')}-{'-'.join(run_dir.parts[-2:])}"
    job = Job(plain, str(run_dir), name, list(hydra_config.overrides.task))
    ranks.send(job)
    return job


def run(job: Job) -> float | None:
    """Build a job's Trainer, train, and return what a sweep compares. All ranks."""
    from runner.distributed import get_global_rank
    from runner.record import write_record

    run_dir = Path(job.run_dir)
    with config_errors(), empty_folder_removed(run_dir):
        trainer = build.build(job.config, run_dir, job.run_name)
    with trainer:
        if get_global_rank() == 0:
            for path in write_record(run_dir, job.config, job.overrides):
                trainer.logger.log_artifact(path, "record")
        trainer.fit()
        return objective(trainer)


def objective(trainer: Any) -> float | None:
    """Return the first metric of the first evaluator, for a sweeper to compare; None without one."""
    for values in trainer.state.eval_metric_values.values():
        for value in values.values():
            return float(value)
    return None


def make_run_folder(base: str) -> str:
    """Return a new folder `base/<date>/<time>`, made for this run alone, however many start in one second."""
    now = datetime.datetime.now()
    day = Path(base).absolute() / f"{now:%Y-%m-%d}"
    day.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        folder = day / (f"{now:%H-%M-%S}" if number == 1 else f"{now:%H-%M-%S}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return str(folder)
    raise OSError(f"no free folder name in {day}")


@contextmanager
def empty_folder_removed(run_dir: Path) -> Iterator[None]:
    """On an error inside, remove the folder of a run that never began, and its day's, unless something is in them."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            run_dir.rmdir()
            run_dir.parent.rmdir()
        raise


def run_folder_of(path: str) -> Path:
    """Return the folder of the run that a path names: itself, or the one around a checkpoint.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"resume={path!r}: no such folder; give a run's folder or a checkpoint's")
    return folder.parent.parent if (folder / "manifest.json").exists() else folder


if __name__ == "__main__":
    sys.exit(main())
