"""A sweep as a whole: its identity, its folder, its start and its stop.

A sweep that is started again skips finished jobs and resumes interrupted ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.cli.command import Command
from runner.cli.command_line import key_of
from runner.cli.nearest import nearest
from runner.config import build
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.core.destination import SweepSummary
from runner.distributed.launch import check_launcher
from runner.distributed.session import ending
from runner.distributed.signals import asking_to_end
from runner.failures.errors import SweepRefused, WrongConfig, WrongKey, wrong_argument
from runner.files.lock import lock_file
from runner.files.names import RESULT, SWEEP
from runner.files.whole import read_object, write_atomically
from runner.history.saved_run import SavedRun
from runner.records.folder import make_run_folder, remembered_folder, watch
from runner.records.listing import LOCK, OUTPUTS
from runner.records.recording import fingerprint, identify
from runner.records.result import Result, read_result
from runner.records.sweep_jobs import claims, keep_claims
from runner.sweeps.decide.contenders import VERB, find_contenders
from runner.sweeps.job_loader import JobLoader
from runner.sweeps.ladder.jobs import prepare_ladder
from runner.sweeps.names import common_name, own_overrides, short_names
from runner.sweeps.plan import PlannedJob, check_jobs, compose_jobs, is_grid, planned_overrides, typed_overrides
from runner.sweeps.progress import SweepProgress
from runner.sweeps.search import is_optuna, read_directions, resume_study, silence_optuna

if TYPE_CHECKING:
    from runner.core.destination import LoggerDestination
    from runner.sweeps.decide.contest import Contest

STOP = ".stop"  # a file in the sweep's folder; while it exists, no job starts


@dataclass
class Sweep:
    """A sweep, with the facts that its jobs need in any process.

    Attributes:
        folder: the folder that contains the folders of its jobs.
        id: the id, unique even if several machines log to one MLflow store.
        name: the name, such as `sweep-lr-seed-mlp-digits`.
        identity: a hash of the config and the swept values, equal whenever the same sweep is started again.
        fixed: the keys that were typed with a single value.
        launcher: Hydra's name of the launcher: basic, joblib, submitit_local, ...
        directions: 'minimize' or 'maximize' for each objective if the sweeper needs them; otherwise empty.
        revived: the names of the pruned jobs that this command trains further.
        number: 1; more if its jobs would otherwise have the same names as those of earlier sweeps.
        pid: the process that leads the sweep.

    Attributes used only in the process that leads it:
        destinations: the destinations that receive its summary.
        stopped_by: the signal that stopped it; 0 if none did.
        handlers: the signal handlers from before the sweep.
        progress: prints a line for each job that ends; None for a verb without results.
        passed: the checks that parts of its jobs' configs have passed, see `runner.config.build.once`.
        contest: the settings that it decides between; None for other sweeps.
        is_ladder: whether it trains sizes at equal compute, see `runner.sweeps.ladder.jobs`.
    """

    folder: Path
    id: str
    name: str
    identity: str
    fixed: list[str] = field(default_factory=list)
    launcher: str = "basic"
    directions: list[str] = field(default_factory=list)
    revived: list[str] = field(default_factory=list)
    number: int = 1
    pid: int = field(default_factory=os.getpid)
    destinations: list[LoggerDestination] = field(default_factory=list)
    stopped_by: int = 0
    handlers: dict[int, Any] = field(default_factory=dict)
    progress: SweepProgress | None = None
    contest: Contest | None = None
    is_ladder: bool = False
    passed: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, folder: str | Path) -> Sweep:
        """Return the sweep that a folder belongs to."""
        try:
            return cls(folder=Path(folder), **read_object(Path(folder) / SWEEP))
        except TypeError:
            raise ValueError(f"{Path(folder) / SWEEP}: is damaged; remove it") from None

    def write(self) -> None:
        """Write `sweep.json` into its folder."""
        file = self.folder / SWEEP
        recorded = read_object(file)  # empty if the file is damaged; it is then written again
        if recorded.get("identity", self.identity) != self.identity:
            name = recorded.get("name")
            raise wrong_argument(
                "hydra.sweep.dir", str(self.folder), f"contains another sweep, {name}; choose another folder"
            )
        known = ("id", "name", "identity", "fixed", "launcher", "directions", "revived", "number", "pid")
        write_atomically(file, json.dumps({key: getattr(self, key) for key in known}, indent=1))

    @property
    def direction(self) -> str:
        """The direction of the first objective; empty if the sweeper needs none."""
        return next(iter(self.directions), "")

    def is_over(self, result: Result | None) -> bool:
        """Return whether a job has ended and is not revived, so that there is nothing left to train."""
        if result is None:
            return False
        is_pruned = result.status == "PRUNED" and result.name not in self.revived
        return is_pruned or result.status in ("FINISHED", "DIVERGED")

    @property
    def is_broken(self) -> bool:
        """Whether it was stopped or a job failed, so that an error of the sweeper or launcher is only a consequence."""
        return self.stopped_by > 0 or any(result.status in ("FAILED", "REFUSED") for result in self.results())

    def clear_notes(self) -> None:
        """Remove the files through which its processes communicated."""
        (self.folder / STOP).unlink(missing_ok=True)
        for result in self.folder.glob(f".refused-*/{RESULT}"):
            shutil.rmtree(result.parent)

    def results(self) -> list[Result]:
        """Return the results of its jobs so far, including refused ones."""
        jobs = [(job.folder, job.result()) for job in claims(self.folder)]
        jobs += [(folder, read_result(folder)) for folder in sorted(self.folder.glob(".refused-*"))]
        results = []
        for folder, result in jobs:
            if result is not None:
                if result.status == "RUNNING" and not is_running(folder):
                    result.status = "KILLED"  # it ended without a result
                results.append(result)
        return results

    def results_of_contest(self) -> dict[tuple[int, int], Result]:
        """Return the results of the settings that it decides between, by the index of the setting and the seed."""
        assert self.contest is not None
        results = {job.key: result for job in claims(self.folder) if (result := job.result()) is not None}
        keys = {
            self.key_of_job(contender.job(seed)): (index, seed)
            for index, contender in enumerate(self.contest.contenders)
            for seed in range(self.contest.most_seeds)
        }
        trained_before = {
            (index, seed): result
            for index, contender in enumerate(self.contest.contenders)
            for seed, result in contender.results.items()
        }
        return trained_before | {keys[key]: result for key, result in results.items() if key in keys}

    def leave_out_unplanned(self, config: DictConfig, jobs: Sequence[PlannedJob]) -> None:
        """Leave out earlier jobs that are not planned, or had another config, if all planned jobs are known."""
        if is_grid(config):
            keep_claims(self.folder, {self.key_of_job(job.overrides): identify(job.config) for job in jobs})

    def key_of_job(self, overrides: Sequence[str]) -> str:
        """Return the key of the job with these overrides; overrides that all jobs share do not change it."""
        return fingerprint(sorted(own_overrides(overrides, self.fixed)))


class SweepCallback(Callback):
    """Hydra's callback for the start of a sweep, in the process that leads it."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Prepare the sweep; Hydra has composed everything except the swept values."""
        try:
            with config_errors():
                begin(config)
        except WrongConfig as error:
            raise SweepRefused(error) from error


command = Command.of("train")
"""The command of this process, whose verb the jobs of its sweep run."""
current: Sweep | None = None
"""The sweep of this process, if it runs one."""


def begin(config: DictConfig) -> None:
    """Set up the sweep and check all of its jobs before the first one starts."""
    global current, _config
    verb = command.row
    if not verb.can_be_swept:  # -m itself is refused when the command is parsed
        raise WrongKey("hydra.mode", f"{command.verb} takes one experiment at a time; leave it out", "'MULTIRUN'")
    prepare_ladder(config)
    typed = typed_overrides(config)
    _config = config
    folder = Path(config.hydra.sweep.dir).absolute()
    watch(folder)
    check_launcher(config.hydra.runtime.choices["hydra/launcher"])
    sweep = _make_sweep(config, folder, typed)
    sweep.revived = _find_revived(sweep, command.options.get("revive", ()))
    current = sweep
    folder.mkdir(parents=True, exist_ok=True)
    current.write()
    current.clear_notes()
    total = config.hydra.sweeper.get("n_trials")  # None if the sweeper does not define it
    if is_optuna(config):
        silence_optuna()
        results = [result for result in current.results() if result.status != "REFUSED"]
        ended = [result for result in results if current.is_over(result)]
        resume_study(config, current.id, ended, [result for result in results if result not in ended])
    planned = planned_overrides(config, typed)
    if command.verb == VERB:
        current.contest = _make_contest(typed)
        planned = [[*current.contest.shared, *contender.job(0)] for contender in current.contest.contenders]
    loader = JobLoader(config)
    jobs = compose_jobs(planned, current.fixed, loader) if verb.keeps_folder else []
    if verb.keeps_folder:
        if command.run is None:
            check_jobs(jobs, current.launcher, current.passed)
            current.leave_out_unplanned(config, jobs)
        if current.contest is not None:  # a refused command compares nothing
            current.contest.enter_campaign(current.identity)
        current.destinations = build.make_destinations(jobs[0].callbacks)
        for destination in current.destinations:
            destination.log_sweep(SweepSummary(folder, current.id, current.name, "RUNNING"))
        current.progress = SweepProgress(
            current, [job.overrides for job in jobs], len(jobs) if is_grid(config) else total
        )
        current.progress.start()
    _catch_signals(current)


def _make_sweep(config: DictConfig, folder: Path, typed: Sequence[Any]) -> Sweep:
    """Return the sweep of a config and of the overrides that were typed."""
    identity = _identify(config)
    swept = [override.get_key_element().lstrip("+~") for override in typed if override.is_sweep_override()]
    if command.verb == VERB:
        contenders = find_contenders(command, typed)
        swept = [*dict.fromkeys(key_of(override) for each in contenders for override in each.overrides)]
    name, number = _choose_name(config, swept, folder)
    return Sweep(
        folder=folder,
        id=f"{'-'.join(folder.parts[-2:])}-{identity[:6]}",
        name=name,
        identity=identity,
        fixed=[override.get_key_element() for override in typed if not override.is_sweep_override()],
        launcher=config.hydra.runtime.choices["hydra/launcher"],
        directions=read_directions(config),
        number=number,
        is_ladder=bool(config.get("ladder")),
    )


def _make_contest(typed: Sequence[Any]) -> Contest:
    """Return the settings that the command compares, with its rules."""
    from runner.sweeps.decide.contest import Contest  # imports numpy, which takes a tenth of a second

    shared = [str(override.input_line) for override in typed if not override.is_sweep_override()]
    return Contest.of(command, find_contenders(command, typed), shared)


def _find_revived(sweep: Sweep, names: Sequence[str]) -> list[str]:
    """Return the names of the jobs to revive."""
    if not names:
        return []
    statuses = {result.name: result.status for result in sweep.results() if result.status != "REFUSED"}
    if not statuses:
        raise WrongKey(
            "--revive",
            "no job of this sweep has started yet; add it to the command that pruned the jobs",
            repr(",".join(names)),
        )
    if "all" in names:
        return [name for name, status in statuses.items() if status == "PRUNED"]
    for name in names:
        if name not in statuses:
            raise WrongKey("--revive", "this sweep has no such job; " + nearest(name, ["all", *statuses]), repr(name))
    return [*names]


def _choose_name(config: DictConfig, swept: list[str], folder: Path) -> tuple[str, int]:
    """Return the name of a sweep, and its number among the sweeps in outputs/ whose jobs would have the same names."""
    choices = config.hydra.runtime.choices
    kind = VERB if command.verb == VERB else "sweep"
    base = "-".join([kind, *sorted(short_names(swept).values()), common_name(swept, config.run_name, choices, 1)])
    number = 1
    for file in Path(OUTPUTS).glob(f"sweeps/*/*/{SWEEP}"):
        sweep = read_object(file)
        if re.fullmatch(rf"{re.escape(base)}(-\d+)?", str(sweep.get("name"))) and isinstance(sweep.get("number"), int):
            if file.parent.absolute() == folder:
                number = sweep["number"]
                break
            number = max(number, sweep["number"] + 1)
    return (base if number == 1 else f"{base}-{number}"), number


def check_choice(typed: Command, hydra_config: Any, experiment: Experiment, saved: SavedRun | None) -> None:
    """For a single run, refuse choices that work only in sweeps.

    A saved run may be a job of a sweep, whose recorded choices are allowed.
    """
    if hydra_config.mode is RunMode.MULTIRUN:
        return
    if names := typed.options.get("revive"):
        remedy = "is for rerunning a sweep with -m; runner resume with the folder of a job revives a single one"
        raise WrongKey("--revive", remedy, repr(",".join(names)))
    if saved is None and typed.row.trains:
        for key in build.classes_with("only_in_sweeps", experiment.callbacks):
            raise WrongKey(f"callbacks.{key}", "compares the jobs of a sweep; add -m, and values to sweep over")
    recorded = () if saved is None else saved.overrides
    choices = hydra_config.runtime.choices
    groups = {"sweep": None, "hydra/sweeper": "basic", "hydra/launcher": "basic"}
    if f"sweep={choices.get('sweep')}" in recorded:  # the recorded sweep may have chosen a sweeper or a launcher
        groups = {group: plain for group, plain in groups.items() if _is_typed(group, hydra_config)}
    for group, plain in groups.items():
        choice = choices.get(group)
        if choice != plain and f"{group}={choice}" not in recorded:
            raise WrongKey(group, f"is for several runs; add -m: python -m runner -m {group}={choice}", str(choice))


def _is_typed(group: str, hydra_config: Any) -> bool:
    return any(override.startswith(f"{group}=") for override in hydra_config.overrides.hydra)


def register_resolver() -> None:
    """Register `${sweep_folder:base}`, which names the sweep's folder."""
    OmegaConf.register_new_resolver("sweep_folder", _find_folder, use_cache=True, replace=True)


_config: DictConfig | None = None  # the config of the sweep that this process leads


def _find_folder(base: str) -> str:
    """Return the sweep's folder from an earlier start, or else a new one."""
    if _config is None or not command.row.trains:
        return make_run_folder(base)
    return remembered_folder(base, _identify(_config), renew=command.options["afresh"])


def _identify(config: DictConfig) -> str:
    """Return a hash of the command, the swept values, the config and the sweeper, but not of the launcher."""
    keys = [str(key) for key in config if key != "hydra"]
    plain = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=False)
    sweeper = OmegaConf.to_container(config.hydra.sweeper, resolve=False)
    swept = sorted(str(override.input_line) for override in typed_overrides(config) if override.is_sweep_override())
    return fingerprint([command.verb, *command.words, plain, sweeper, swept])


def _catch_signals(sweep: Sweep) -> None:
    """Let signals end the sweep cleanly from now on: jobs save checkpoints, and the results so far are summarized."""
    sweep.handlers = {number: signal.signal(number, _stop) for number in asking_to_end()}


def _stop(number: int, frame: FrameType | None) -> None:
    """Start no more jobs, and stop the jobs on this machine; a second Ctrl-C ends this process immediately.

    While a job trains in this process, that job handles signals instead.
    """
    assert current is not None
    is_second = current.stopped_by > 0
    current.stopped_by = number
    (current.folder / STOP).touch()
    if current.launcher == "basic" or (is_second and number == signal.SIGINT):
        raise ending(number)
    for folder in current.folder.glob("*/"):
        result = read_result(folder)
        if result is not None and result.host == socket.gethostname() and is_running(folder):
            with suppress(ProcessLookupError):
                os.kill(result.pid, signal.SIGTERM)


def is_running(folder: Path) -> bool:
    """Return whether a process is training the job in a folder right now."""
    if not (folder / LOCK).exists():
        return False
    lock = lock_file(folder / LOCK)
    if lock is not None:
        lock.close()
    return lock is None
