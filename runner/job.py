"""One job: from the config that Hydra composed to what came of it. Imported by name wherever a launcher runs jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.config import build
from runner.config.composed import to_plain
from runner.config.errors import config_errors
from runner.distributed.endings import ended_by_signals
from runner.distributed.gpus import given_back, lease
from runner.distributed.launch import Job, alone, check_gpus
from runner.distributed.local_ranks import ranks
from runner.distributed.threads import choose_threads, parallel_jobs, with_threads
from runner.modes.check import check
from runner.modes.compare import compare
from runner.modes.evaluate import evaluate, predict, without_training
from runner.modes.explain import explain
from runner.modes.prove import check_provable, prove
from runner.modes.sync import sync
from runner.runs import folder as run_folder
from runner.runs.changes import tell_changes, tell_changes_of_rerun
from runner.runs.folder import checkpoint_before_restart, owned, removed_when_refused, run_folder_of
from runner.runs.kept_code import import_from
from runner.runs.optimizer_changes import change_optimizers
from runner.runs.record import log_record
from runner.runs.rerun import arguments_to_record, begun_again, name_again
from runner.runs.result import check_converged, check_objective, is_unfinished, recording
from runner.runs.saved_run import SavedRun, from_the_start
from runner.sweeps import sweep
from runner.sweeps.job import attempt, label_of, placed
from runner.terminal import labelled_lines, lasting_output

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
        if self.saved is not None:
            import_from(self.saved.code)
        if hydra_config.mode is RunMode.MULTIRUN:
            nothing = None if config.mode in ("train", "eval") else 0.0  # to compare; Optuna wants a number
            with lasting_output(), labelled_lines(label_of(config.run_name, hydra_config)), given_back():
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
    """Return the job of a composed config, checked; where it needs other ranks, they have been started."""
    run_dir = Path(hydra_config.runtime.output_dir)
    with removed_when_refused(run_dir), config_errors():
        plain, overrides = to_plain(config), list(hydra_config.overrides.task)
        sweep.check_choice(hydra_config)
        if saved is not None:
            plain = begun_again(saved, plain, overrides)
        threads = start_ranks(plain, hydra_config) if plain["mode"] in ON_ALL_RANKS else None
        resume, tags = plain["resume"], {}
        if plain["mode"] in ("eval", "predict"):
            resume, (plain, tags) = None, without_training(plain, saved)
        elif saved is not None and resume is not None and plain["mode"] in TRAINING and from_the_start(saved):
            plain["resume"] = None  # in its folder all the same
        check_in_mode(plain, hydra_config)
        if resume is not None:
            run_dir = Path(saved.run_dir) if saved and saved.run_dir else run_folder_of(resume) or run_dir
        is_single = plain["mode"] == "train" and hydra_config.mode is RunMode.RUN  # a sweep knows its jobs by itself
        restarted = checkpoint_before_restart(run_dir) if is_single else None
        plain["resume"] = restarted or plain["resume"]
        may_be_over = restarted is not None or (is_single and resume is not None and is_unfinished(run_dir))
        if restarted is None:
            tell_differences(plain, resume, saved, overrides)
    return Job(
        config=plain,
        run_dir=str(run_dir),
        run_name=name_run(plain, run_dir, saved, hydra_config.runtime.choices),
        overrides=overrides,
        tags=tags,
        threads=threads,
        may_be_over=may_be_over,
        arguments=arguments_to_record(saved, hydra_config),
        code={} if saved is None else saved.code,
    )


def start_ranks(config: Mapping[str, Any], hydra_config: Any) -> int | None:
    """Have what a job needs besides this process start, before torch is imported here; return each rank's threads."""
    build.warm_up(config)
    launch = build.make_launch(config)
    processes, jobs = launch.processes(), parallel_jobs(hydra_config)
    threads = choose_threads(launch.threads, processes, jobs)
    if jobs > 1 and config["trainer"].get("device", "auto") in ("auto", "cuda"):
        lease(processes, (Path(hydra_config.sweep.dir) / sweep.STOP).exists)
    ranks().start(processes, threads)
    return threads


def check_in_mode(config: Mapping[str, Any], hydra_config: Any) -> None:
    """Raise where a config cannot do what its mode asks for.

    Raises:
        ValueError: the message names the key.
    """
    mode = config["mode"]
    if mode not in ("compare", "sync"):
        build.check(config)
    if mode == "prove":
        check_provable(config, is_sweep=hydra_config.mode is RunMode.MULTIRUN)
    if mode in ON_ALL_RANKS:
        check_gpus(build.make_launch(config).processes(), config["trainer"].get("device"))  # of this machine


def tell_differences(
    config: Mapping[str, Any], resume: str | None, saved: SavedRun | None, overrides: Sequence[str]
) -> None:
    """Say what a run that goes on, or is made again, does otherwise than it did; raise what it may not.

    Args:
        config: of the run now.
        resume: the run or checkpoint that it goes on from.
        saved: its record, where it has one.
        overrides: its own and those typed now.
    """
    if saved is not None and config["rerun"] is not None:
        tell_changes_of_rerun(saved.config, config)
    elif resume is not None and config["mode"] in TRAINING:
        tell_changes(resume, saved.config if saved else None, config, overrides)


def name_run(config: Mapping[str, Any], run_dir: Path, saved: SavedRun | None, choices: Mapping[str, str]) -> str:
    """Return the name of a run: as typed, as it was before, or made of its model, its data and its folder."""
    name = config["run_name"] or "-".join(
        [*(choices.get(one) or f"own-{one}" for one in ("model", "data")), *run_dir.parts[-2:]]
    )
    if saved is not None and config["run_name"] == saved.config.get("run_name"):
        name = name_again(saved, config, run_dir) or name
    return f"{config['mode']}-{name}" if config["mode"] in ("eval", "predict") else str(name)


def run(job: Job) -> float | None:
    """Do a job's work in its mode, and return what a sweep compares. All ranks."""
    import_from(job.code)
    with removed_when_refused(Path(job.run_dir)), with_threads(job.threads), ExitStack() as stack:
        if job.config["mode"] in ON_ALL_RANKS:
            stack.enter_context(ended_by_signals(build.make_launch(job.config).grace))
        return MODES[job.config["mode"]](job)


def train(job: Job) -> float | None:
    """Build a job's Trainer, train, and return the objective. All ranks."""
    with recording(job) as result:
        with config_errors():
            trainer = build.build(job.config, Path(job.run_dir), job.run_name)
        from runner.modes.diagnosis import noting_faults  # imports torch, which `build` has done by now

        with trainer:
            with config_errors():
                change_optimizers(trainer.state, job.config)
                record(trainer, job)
            trainer.noting = partial(noting_faults, job.config)
            with config_errors("FIT_START"):
                trainer.fit(may_be_over=job.may_be_over)
            result.measure(trainer.state, job.config["objective"])
            if not job.config["allow_divergence"]:
                check_converged(trainer.state, result)
    return result.objective


MODES: dict[str, Callable[[Job], float | None]] = {
    "train": train,
    "check": check,
    "explain": explain,
    "eval": evaluate,
    "predict": predict,
    "prove": prove,
    "compare": compare,
    "sync": sync,
}
ON_ALL_RANKS = ("train", "eval", "predict")
TRAINING = ("train", "check", "explain")  # and what only says what training would do


def record(trainer: Any, job: Job) -> None:
    """Write down how a run was made, once it is known that it can begin. All ranks."""
    from runner.arguments import check_trainable

    now, end = trainer.state.timestamp, trainer.state.max_duration
    if now >= end and not job.may_be_over:
        raise ValueError(
            f"trainer.max_duration={str(end)!r} is reached: this run has finished. To train it for longer, add "
            f"trainer.max_duration=<more than {now.get(end.unit)}>"
        )
    check_trainable(trainer.state, job.may_be_over)
    check_objective(trainer.state, job.config["objective"])
    log_record(trainer.logger, job, trainer.state.resumed_from)
