"""One job: from the config that Hydra composed to what came of it. Imported by name wherever a launcher runs jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner import build, run_folder
from runner.launch import Job, ranks
from runner.run_folder import removed_when_refused, run_folder_of
from runner.wrong_config import config_errors

run_folder.register_resolver()


class Task:
    """What Hydra calls for each job, in whichever process its launcher runs it.

    A single run's own error is kept in `error` and does not pass through Hydra, which would print it in its own way.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, config: DictConfig) -> float | None:
        hydra_config = HydraConfig.get()
        try:
            return perform(config, hydra_config)
        except Exception as error:
            if hydra_config.mode is RunMode.MULTIRUN:
                raise
            self.error = error
            return None


def perform(config: DictConfig, hydra_config: Any) -> float | None:
    """Do what a composed config asks for, on all ranks where it trains; return what a sweep compares."""
    job = prepare(config, hydra_config)
    ranks().send(job)
    return run(job)


def prepare(config: DictConfig, hydra_config: Any) -> Job:
    """Return the job of a composed config, checked."""
    run_dir = Path(hydra_config.runtime.output_dir)
    with removed_when_refused(run_dir), config_errors():
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        for group in ("experiment", "sweep"):  # they have set other keys, and hold none themselves
            plain.pop(group, None)
        build.warm_up(plain)
        build.check(plain)
        if plain["resume"] is not None:
            run_dir = run_folder_of(plain["resume"])
    choices = hydra_config.runtime.choices
    name = plain["run_name"] or f"{choices.get('model')}-{choices.get('data')}-{'-'.join(run_dir.parts[-2:])}"
    return Job(plain, str(run_dir), str(name), list(hydra_config.overrides.task))


def run(job: Job) -> float | None:
    """Do a job's work in its mode, and return what a sweep compares. All ranks."""
    with removed_when_refused(Path(job.run_dir)):
        return MODES[job.config["mode"]](job)


def train(job: Job) -> float | None:
    """Build a job's Trainer, train, and return the objective. All ranks."""
    with config_errors():
        trainer = build.build(job.config, Path(job.run_dir), job.run_name)
    with trainer:
        with config_errors():
            record(trainer, job)
        with config_errors("FIT_START"), build.naming_hooks(job.config):
            trainer.fit()
        return objective(trainer)


MODES: dict[str, Callable[[Job], float | None]] = {"train": train}


def record(trainer: Any, job: Job) -> None:
    """Write down how a run was made, once it is known that it can begin. All ranks."""
    from runner.arguments import check_trainable
    from runner.distributed import get_global_rank
    from runner.record import write_record

    check_trainable(trainer.state)
    if get_global_rank() == 0:
        trainer.logger.log_tags(job.tags)
        for path in write_record(Path(job.run_dir), job.config, job.overrides):
            trainer.logger.log_artifact(path, "record")


def objective(trainer: Any) -> float | None:
    """Return the first metric of the first evaluator, for a sweeper to compare; None without one."""
    for values in trainer.state.eval_metric_values.values():
        for value in values.values():
            return float(value)
    return None
