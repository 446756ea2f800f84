"""Runs a job, from its composed config to the objective of a sweep. Launchers import this module by name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.cli.command import AT, Command
from runner.cli.command_line import LISTS, key_of
from runner.comparing.changes import changes_of_fork, changes_of_resume, find_changes
from runner.config import build
from runner.config.composed import to_plain
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.config.replaced import about_dropped, without_replaced
from runner.distributed.endings import ended_by_signals
from runner.distributed.environment import is_rank_zero, without_ranks
from runner.distributed.fork_server import start_fork_server
from runner.distributed.gpus import given_back, lease
from runner.distributed.launch import Ranks, check_gpus
from runner.distributed.local_ranks import ranks
from runner.distributed.session import requeued_by_signals
from runner.distributed.slurm import is_job as is_slurm_job
from runner.distributed.slurm import use_tasks_as_ranks
from runner.distributed.standstill import ended_when_stuck
from runner.distributed.threads import DEFAULT_THREADS, Threads, choose_threads, parallel_jobs, with_threads
from runner.failures.errors import Diverged, SessionOver, WrongConfig
from runner.failures.exit_codes import INTERRUPTED, WRONG_CONFIG, code_of_failure
from runner.failures.exits import exits_as_failures
from runner.history.forks import find_fork
from runner.history.rerun import arguments_to_record, default_name, merge_config, options_of, saved_name
from runner.history.saved_run import SavedRun, from_the_start
from runner.history.weights import with_saved_weights
from runner.libraries.importing import importing
from runner.records import folder as run_folder
from runner.records.folder import check_unused, checkpoint_before_restart, owned, removed_when_refused, run_folder_of
from runner.records.job import Job
from runner.records.kept_code import import_from
from runner.records.kept_threads import keep_threads
from runner.records.result import Objective, is_unfinished
from runner.sweeps import sweep
from runner.sweeps.job import attempt, placed
from runner.terminal import commands
from runner.terminal.console import announce, print_failure
from runner.terminal.output import lasting_output, output_to
from runner.terminal.text import PrintableFormatter, print_to_stderr
from runner.verbs import module_of

log = logging.getLogger("runner")

run_folder.register_resolver()
sweep.register_resolver()


class HydraTask:
    """The function that Hydra calls for each job, in whichever process the launcher runs the job.

    The error of a single run is stored in `error` rather than raised, because Hydra would print it in its own way.
    """

    def __init__(self, command: Command, saved: SavedRun | None = None) -> None:
        self.command = command
        self.saved = saved
        self.error: Exception | None = None

    def __call__(self, config: DictConfig) -> Objective:
        hydra_config = HydraConfig.get()
        if self.saved is not None:
            import_from(self.saved.code)
        if hydra_config.mode is RunMode.MULTIRUN:
            return self._do_in_sweep(config, hydra_config)
        try:
            return perform(config, hydra_config, self.command, self.saved)
        except Exception as error:
            self.error = error
            return None

    def _do_in_sweep(self, config: DictConfig, hydra_config: Any) -> Objective:
        if sweep.current is None:  # a launcher started this process
            commands.sweep_arguments[:] = self.command.arguments
        without_objective = None if self.command.row.has_objective else 0.0  # Optuna needs a number
        with lasting_output(), given_back(), ExitStack() as stack:
            if use_tasks_as_ranks():  # the launcher started several tasks for this job
                if not is_rank_zero():
                    with suppress(SystemExit):  # rank 0 has no more jobs
                        follow(ranks())
                    return None
                stack.callback(ranks().dismiss, 0)
            return attempt(
                partial(perform, config, hydra_config, self.command, self.saved), hydra_config, without_objective
            )


@exits_as_failures()
def perform(config: DictConfig, hydra_config: Any, command: Command, saved: SavedRun | None) -> Objective:
    """Run the job of a composed config, on all ranks if its verb needs them, and return the objective of a sweep."""
    job = prepare(config, hydra_config, command, saved)
    verb = command.row
    if not verb.on_all_ranks:
        with without_ranks():
            return run(job)
    if hydra_config.mode is RunMode.RUN:
        with owned(Path(job.run_dir)) if verb.keeps_folder else nullcontext():
            if verb.trains and is_slurm_job() and not sys.stdout.isatty():
                return run_logged(job)
            with ranks().sharing(asdict(job)):
                return run(job)
    with placed(job, hydra_config) as (job, result):
        if result is not None:  # the job is done already, or another process is running it
            return result.answer
        with ranks().sharing(asdict(job)):
            return run(job)


@dataclass(frozen=True)
class _Start:
    """The start of a job.

    Attributes:
        experiment: the experiment to train, with the weights to load.
        continued: the run to continue in its own folder; None for a new run.
        resume: the checkpoint to begin with, or its folder; None: start from the beginning.
        tags: facts about the run that the job begins from.
    """

    experiment: Experiment
    continued: str | None = None
    resume: str | None = None
    tags: dict[str, str] = field(default_factory=dict)


def _find_start(command: Command, experiment: Experiment, saved: SavedRun | None) -> _Start:
    """Return the start of the job of a command."""
    verb = command.row
    run = command.run if saved is None else saved.path  # the user may have typed an id
    if verb.uses_weights:
        experiment, tags = with_saved_weights(command, experiment, run, saved)
        return _Start(experiment, tags=tags)
    if verb.uses_run == "fork":
        checkpoint, tags = find_fork(command, None if saved is None else saved.run_dir)
        return _Start(experiment, resume=checkpoint, tags=tags)
    if run is None or verb.uses_run != "resume":
        return _Start(experiment)
    if saved is not None and verb.needs_experiment and from_the_start(saved):
        return _Start(experiment, continued=run)  # without a checkpoint, the run still keeps its folder
    return _Start(experiment, continued=run, resume=run)


def prepare(config: DictConfig, hydra_config: Any, typed: Command, saved: SavedRun | None) -> Job:
    """Check a composed config and return its job. If the job needs other ranks, start them."""
    run_dir = output_dir(hydra_config)
    with removed_when_refused(run_dir), config_errors():
        experiment, command = _experiment_of(config, hydra_config, typed, saved)
        overrides = list(hydra_config.overrides.task)
        verb = command.row
        if verb.keeps_folder:  # otherwise no destination is called
            build.warm_up(experiment.callbacks)
        threads = start_ranks(experiment, hydra_config) if verb.on_all_ranks else DEFAULT_THREADS
        start = _find_start(command, experiment, saved)
        experiment = start.experiment
        if start.continued is not None:
            run_dir = Path(saved.run_dir) if saved and saved.run_dir else run_folder_of(start.continued) or run_dir
        elif verb.trains and hydra_config.mode is RunMode.RUN:
            check_unused(run_dir)
        run_name = name_run(command, experiment, run_dir, saved, hydra_config.runtime.choices)
        is_single = verb.trains and hydra_config.mode is RunMode.RUN  # a sweep keeps track of its own jobs
        if is_single and "console_summary" in experiment.callbacks:
            announce(run_name, run_dir)  # before torch is imported, which takes seconds
        source = "" if verb.uses_run != "retrain" or saved is None else saved.run_dir or ""
        with importing():
            check_command(command, experiment)
            if start.resume is not None and verb.needs_experiment:
                build.checkpoint_of("RUN", start.resume)
        restarted = checkpoint_before_restart(run_dir) if is_single else None
        differences: list[str] = []
        if restarted is None:
            before = start.resume or start.continued
            differences = [*map(str, find_differences(command, experiment.plain, before, saved, overrides))]
        may_be_over = is_single and start.continued is not None and is_unfinished(run_dir)
    return Job(
        experiment=experiment,
        run_dir=str(run_dir),
        run_name=run_name,
        command=typed,
        resume=restarted or start.resume,
        source=source,
        overrides=overrides,
        tags=start.tags,
        threads=threads,
        may_be_over=restarted is not None or may_be_over,
        arguments=arguments_to_record(saved, hydra_config),
        code={} if saved is None else saved.code,
        parent=_parent_of(experiment, saved) if verb.uses_run == "fork" else None,
        choices=chosen_names(hydra_config.runtime.choices, overrides),
        differences=differences,
    )


def _parent_of(experiment: Experiment, saved: SavedRun | None) -> Experiment | None:
    """Return the experiment of the run that a fork begins from; keys that its record lacks come from the fork."""
    return None if saved is None else experiment.changed(**saved.config)


def _experiment_of(
    config: DictConfig, hydra_config: Any, command: Command, saved: SavedRun | None
) -> tuple[Experiment, Command]:
    """Return the experiment of a composed config, without replaced keys, and merged into the config of a saved run.

    In a sweep over the batches of a fork, the returned command has the batch of this job.
    """
    typed: Any = OmegaConf.to_container(hydra_config.overrides.task)  # not resolved, so that to_plain reports errors
    config, dropped = without_replaced(config, typed, options_of(hydra_config))
    if dropped and hydra_config.mode is RunMode.RUN:
        print_to_stderr(about_dropped(dropped))
    plain = to_plain(config)
    if command.row.uses_run == "fork" and AT in plain:
        command = replace(command, words=(command.words[0], str(plain.pop(AT))))
    overrides = list(hydra_config.overrides.task)
    experiment = Experiment(plain if saved is None else merge_config(saved, plain, overrides))
    sweep.check_choice(command, hydra_config, experiment, saved)
    return experiment, command


def output_dir(hydra_config: Any) -> Path:
    """Return the folder that Hydra chose; `${seed}` in its name is not an interpolation."""
    runtime: Any = OmegaConf.to_container(hydra_config.runtime)
    return Path(runtime["output_dir"])


def start_ranks(experiment: Experiment, hydra_config: Any) -> Threads:
    """Start the other processes of a job before this one imports torch, and return the CPU threads per rank."""
    launch = experiment.launch
    processes = launch.processes()
    jobs = parallel_jobs(hydra_config)
    threads = choose_threads(launch.threads, processes, jobs)
    if jobs > 1 and experiment.trainer.get("device", "auto") in ("auto", "cuda"):
        lease(processes, (Path(hydra_config.sweep.dir) / sweep.STOP).exists)
    ranks().start(processes, threads.number)
    start_server_of_workers(experiment)
    return threads


def start_server_of_workers(experiment: Experiment) -> None:
    """Start the server of data workers early, if workers read an experiment's data."""
    data = experiment.data
    if data.get("num_workers"):
        start_fork_server(section.target for section in data.nested())


def check_command(command: Command, experiment: Experiment) -> None:
    """Check that a verb can use an experiment."""
    verb = command.row
    if verb.needs_experiment:
        passed = sweep.current.passed if sweep.current is not None else None
        build.check(experiment, passed, is_new=command.run is None)
    if (check := getattr(module_of(verb), "check", None)) is not None:
        check(command, experiment)
    if verb.on_all_ranks:
        check_gpus(experiment.launch.processes(), experiment.trainer.get("device"))


def find_differences(
    command: Command, config: Mapping[str, Any], resume: str | None, saved: SavedRun | None, overrides: Sequence[str]
) -> Iterable[object]:
    """Return how the config of a resumed, forked or rerun run differs from the recorded config."""
    if saved is not None and command.row.uses_run == "fork":
        return changes_of_fork(command.words[1], resume or saved.typed, saved.config, saved.is_own, config)
    if saved is not None and command.row.uses_run in ("rerun", "retrain"):
        return find_changes(saved.config, config)
    if resume is not None and (allowed := command.options.get("allow_changes")) is not None:
        recorded, is_own = (saved.config, saved.is_own) if saved is not None else (None, True)
        return changes_of_resume(resume, recorded, is_own, config, overrides, allowed)
    return ()


def name_run(
    command: Command, experiment: Experiment, run_dir: Path, saved: SavedRun | None, choices: Mapping[str, str]
) -> str:
    """Return the name of a run: the one typed or recorded, or else a name made from its folder, model and data.

    The verb comes first if the run only uses the weights of another run.
    """
    name = experiment.run_name
    if not name:
        chosen = [choices.get(group) or f"own-{group}" for group in ("model", "data")]
        name = default_name(chosen, run_dir)
    if saved is not None and experiment.run_name == saved.config.get("run_name"):
        name = saved_name(command, saved, experiment, run_dir) or name
    return f"{command.verb}-{name}" if command.row.uses_weights else str(name)


def chosen_names(choices: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Return the chosen names by group, for the runner's groups with a single choice, unless a target was typed."""
    typed = {key_of(override) for override in overrides}
    single = (group for group in choices if group not in LISTS and not group.startswith("hydra/"))
    names = {group: choices[group] for group in single if f"{group}._target_" not in typed}
    return {group: name for group, name in names.items() if isinstance(name, str) and name != "null"}


@exits_as_failures()
def run(job: Job) -> Objective:
    """Run the verb of a job, and return the objective of a sweep. Call it on all ranks that take part."""
    import_from(job.code)
    verb = job.command.row
    if is_rank_zero():
        for difference in job.differences:
            print_to_stderr(f"INFO: {difference}")  # in a sweep, to the job's log
    threads = keep_threads(job) if verb.trains else job.threads
    with removed_when_refused(Path(job.run_dir)), with_threads(*threads), ExitStack() as stack:
        if verb.on_all_ranks:
            launch = job.experiment.launch
            if launch.requeue and not is_slurm_job() and verb.trains and is_rank_zero():
                log.warning("launch.requeue=true: has no effect outside Slurm")
            stack.enter_context(requeued_by_signals(launch.requeues))
            stack.enter_context(ended_by_signals(launch.grace))
            device = str(job.experiment.trainer.get("device", "auto"))
            stack.enter_context(ended_when_stuck(launch.patience_seconds, Path(job.run_dir), device))
        if verb.folder == "temporary" and job.resume is None:  # else the folder belongs to another run
            stack.callback(run_folder.remove_empty, Path(job.run_dir))
        return module_of(verb).run(job)


def run_logged(job: Job) -> Objective:
    """Run a job, and keep the output of all ranks in its folder as well. Rank 0."""
    job = replace(job, log=run_folder.begin_log(Path(job.run_dir)), is_logged_too=True)
    try:
        with output_to(job.log, job.is_logged_too), ranks().sharing(asdict(job)):
            return run(job)
    except WrongConfig:
        raise
    except Exception as error:
        with output_to(job.log):  # the command prints it later
            print_failure(error)
        raise


def follow(ranks: Ranks) -> int:
    """Run the jobs that rank 0 sends, and return the exit code. All ranks but 0.

    Only rank 0 prints errors that all ranks raise. A warning names its rank.
    """
    if logging.lastResort is not None:  # only rank 0 has Hydra's handlers
        logging.lastResort.setFormatter(PrintableFormatter(f"%(levelname)s: rank {ranks.rank}: %(message)s"))
    try:
        return _follow(ranks)
    finally:
        ranks.leave()


def _follow(ranks: Ranks) -> int:
    for job in map(Job.from_message, ranks.receive()):
        start_server_of_workers(job.experiment)
        with output_to(job.log, job.is_logged_too):
            try:
                run(job)
            except WrongConfig as error:
                if not ranks.has_next_message():
                    print_to_stderr(f"error on rank {ranks.rank}: {error}")
                    return WRONG_CONFIG
            except (Diverged, SessionOver):
                continue  # rank 0 has the same error, and decides whether another job follows
            except KeyboardInterrupt:
                return INTERRUPTED
            except Exception as error:
                if ranks.report(error):
                    print_failure(error)
                return code_of_failure(error)
    return 0
