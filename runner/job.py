"""One job: from the config that Hydra composed to what came of it. Imported by name wherever a launcher runs jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from runner import build
from runner.composed import to_plain
from runner.modes.check import check
from runner.modes.evaluate import evaluate, predict, without_training
from runner.modes.explain import explain
from runner.modes.sync import sync
from runner.processes.launch import Job, alone, check_gpus
from runner.processes.local_ranks import ranks
from runner.processes.threads import choose_threads, parallel_jobs, with_threads
from runner.records import run_folder
from runner.records.record import log_record
from runner.records.result import check_objective, recording
from runner.records.run_folder import checkpoint_before_restart, owned, removed_when_refused, run_folder_of
from runner.records.saved_run import SavedRun, begun_again
from runner.sweeps import sweep
from runner.sweeps.job import attempt, placed
from runner.wrong_config import config_errors

run_folder.register_resolver()
sweep.register_resolver()


class Task:
    """What Hydra calls for each job, in whichever process its launcher runs it.

    A single run's own error is kept in `error` and does not pass through Hydra, which would print it in its own way.

    Args:
        saved: the run that `resume=` or `rerun=` names.
    """

    def __init__(self, saved: SavedRun | None = None) -> None:
        self.saved = saved
        self.error: Exception | None = None

    def __call__(self, config: DictConfig) -> float | None:
        hydra_config = HydraConfig.get()
        if hydra_config.mode is RunMode.MULTIRUN:
            nothing = None if config.mode in ("train", "eval") else 0.0  # to compare; Optuna wants a number
            return attempt(partial(perform, config, hydra_config, self.saved), hydra_config, nothing)
        try:
            return perform(config, hydra_config, self.saved)
        except Exception as error:
            self.error = error
            return None


def perform(config: DictConfig, hydra_config: Any, saved: SavedRun | None) -> float | None:
    """Do what a composed config asks for, on all ranks where it needs them; return what a sweep compares."""
    job = prepare(config, hydra_config, saved)
    if job.config["mode"] not in ON_ALL_RANKS:
        with alone():
            return run(job)
    if hydra_config.mode is RunMode.RUN:
        with owned(Path(job.run_dir)), ranks().sharing(job):
            return run(job)
    with placed(job, hydra_config) as (job, result):
        if result is not None:  # it is done
            return result.objective
        with ranks().sharing(job):
            return run(job)


def prepare(config: DictConfig, hydra_config: Any, saved: SavedRun | None) -> Job:
    """Return the job of a composed config, checked."""
    run_dir = Path(hydra_config.runtime.output_dir)
    tags: dict[str, str] = {}
    threads = None
    with removed_when_refused(run_dir), config_errors():
        plain = to_plain(config)
        overrides = list(hydra_config.overrides.task)
        sweep.check_choice(hydra_config)
        if saved is not None:
            plain = begun_again(saved, plain, overrides)
        if plain["mode"] in ON_ALL_RANKS:
            build.warm_up(plain)
            threads = start_ranks(plain, hydra_config)
        if plain["mode"] in ("eval", "predict"):
            plain, tags = without_training(plain, saved)
        if plain["mode"] != "sync":
            build.check(plain)
        if plain["mode"] in ON_ALL_RANKS:
            check_gpus(ranks().size, plain["trainer"].get("device"))
        if plain["resume"] is not None:
            run_dir = Path(saved.run_dir) if saved and saved.run_dir else run_folder_of(plain["resume"])
        if plain["mode"] == "train" and hydra_config.mode is RunMode.RUN:  # a sweep knows its jobs by itself
            plain["resume"] = checkpoint_before_restart(run_dir) or plain["resume"]
    choices = hydra_config.runtime.choices
    name = plain["run_name"] or f"{choices.get('model')}-{choices.get('data')}-{'-'.join(run_dir.parts[-2:])}"
    if saved is not None and plain["rerun"] is None and plain["run_name"] == saved.config.get("run_name"):
        name = saved.run_name or name
    if tags:
        name = f"{plain['mode']}-{name}"
    return Job(plain, str(run_dir), str(name), overrides, tags, threads)


def start_ranks(config: Mapping[str, Any], hydra_config: Any) -> int | None:
    """Have the other ranks of a job start, before torch is imported here; return the CPU threads of each."""
    launch = build.make_launch(config)
    processes = launch.processes()
    threads = choose_threads(launch.threads, processes, parallel_jobs(hydra_config))
    ranks().start(processes, threads)
    return threads


def run(job: Job) -> float | None:
    """Do a job's work in its mode, and return what a sweep compares. All ranks."""
    with removed_when_refused(Path(job.run_dir)), with_threads(job.threads):
        return MODES[job.config["mode"]](job)


def train(job: Job) -> float | None:
    """Build a job's Trainer, train, and return the objective. All ranks."""
    with recording(job) as result:
        with config_errors():
            trainer = build.build(job.config, Path(job.run_dir), job.run_name)
        with trainer:
            # A sweep's job may have been cut off after its last batch, before it could say so.
            if not (trainer.state.timestamp >= trainer.state.max_duration and "runner.sweep" in job.tags):
                with config_errors():
                    record(trainer, job)
                with config_errors("FIT_START"), build.naming_hooks(job.config):
                    trainer.fit()
            result.measure(trainer.state, job.config["objective"])
    return result.objective


MODES: dict[str, Callable[[Job], float | None]] = {
    "train": train,
    "check": check,
    "explain": explain,
    "eval": evaluate,
    "predict": predict,
    "sync": sync,
}
ON_ALL_RANKS = ("train", "eval", "predict")


def record(trainer: Any, job: Job) -> None:
    """Write down how a run was made, once it is known that it can begin. All ranks."""
    from runner.arguments import check_trainable

    check_trainable(trainer.state)
    check_objective(trainer.state, job.config["objective"])
    log_record(trainer.logger, job)
