"""Compose and check all jobs of a sweep before the first one starts, so that errors do not appear hours later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig

from runner.cli.command_line import key_of
from runner.config import build
from runner.config.classes import without_data
from runner.config.composing import parse_override
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.config.replaced import about_dropped
from runner.config.section import Section, sections_in
from runner.failures.errors import ConstructorFailed, WrongConfig, WrongKey
from runner.sweeps.job_loader import JobLoader
from runner.sweeps.names import own_overrides
from runner.terminal.text import print_to_stderr

ON_THIS_MACHINE = ("basic", "joblib", "submitit_local")
"""The launchers that run jobs on the machine that runs the sweep."""


class PlannedJob(NamedTuple):
    """A job of a sweep that has not started."""

    overrides: list[str]
    """The overrides that are specific to this job."""
    config: dict[str, Any]
    """The resolved config; for a job that starts from an earlier run, without the config recorded there."""

    @property
    def callbacks(self) -> Mapping[str, Section]:
        """The sections of its callbacks, by key."""
        return sections_in("callbacks", self.config.get("callbacks"))


def typed_overrides(config: DictConfig) -> list[Override]:
    """Return the overrides that the sweeper gets: the parameters in its config, then those of the command line."""
    params = config.hydra.sweeper.get("params") or {}
    lines = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    parsed = map(parse_override, lines)
    return [*{override.get_key_element(): override for override in parsed}.values()]  # the last override of a key wins


def planned_overrides(config: DictConfig, typed: list[Override]) -> list[list[str]]:
    """Return the overrides of all jobs without duplicates, or of one example if the sweeper chooses as it goes."""
    examples = ([_example(override)] for override in typed)
    combinations = product(*(map(_choices, typed) if is_grid(config) else examples))
    return [*map(list, dict.fromkeys(combinations))]


def compose_jobs(jobs: Sequence[Sequence[str]], fixed: Sequence[str], loader: JobLoader) -> list[PlannedJob]:
    """Return the jobs with these overrides; `fixed` are the keys that all of them share."""
    planned = []
    reported: list[list[str]] = []
    for number, overrides in enumerate(jobs):
        plain, dropped = loader.plain(overrides, number)
        if dropped and dropped not in reported:
            reported.append(dropped)
            print_to_stderr(about_dropped(dropped))
        planned.append(PlannedJob(own_overrides(overrides, fixed), plain))
    HydraConfig.instance().cfg = None
    return planned


def is_grid(config: DictConfig) -> bool:
    """Return whether a sweep trains every combination of values, so that all jobs are known before it starts."""
    return config.hydra.runtime.choices["hydra/sweeper"] == "basic"


def check_jobs(jobs: list[PlannedJob], launcher: str, passed: set[str]) -> None:
    """Check that each job can be built, as far as possible without its data.

    Args:
        jobs: the jobs.
        launcher: Hydra's name of the launcher.
        passed: collects the checks that have passed, so that jobs in this process need not repeat them.
    """
    if launcher == "basic":
        build.warm_up(jobs[0].callbacks)
        _check_all(jobs, passed, runs_here=True)
    else:  # in a separate process, because this one only waits for others and need not import torch
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(_check_all, jobs, passed, launcher in ON_THIS_MACHINE).result()


def name_job_in(message: str, key: str, overrides: Sequence[str], more: int = 0) -> str:
    """Return an error message with the overrides of its job, unless these contain the wrong key.

    `more` is the number of other jobs with the same error.
    """
    if not overrides or key in map(key_of, overrides):
        return message
    return f"{message}\n  in the job {' '.join(overrides)}{f' and {more} more' if more else ''}"


def _check_all(jobs: list[PlannedJob], passed: set[str], runs_here: bool) -> None:
    from runner.trials.dry_run import collecting_warnings

    with collecting_warnings([]):  # the jobs will repeat any warnings
        for job in jobs:
            try:
                with config_errors():
                    experiment = Experiment(job.config)
                    build.check(experiment, passed)
                    _make_parts(experiment, passed, runs_here)
            except WrongConfig as error:
                text = name_job_in(str(error), error.key, job.overrides)
                raise WrongConfig(text, error.key, error.at, error.allowed, error.fix) from error.__cause__


def _make_parts(experiment: Experiment, passed: set[str], runs_here: bool) -> None:
    """Make a job's parts except its data, each distinct section once for all jobs; the model on meta if possible."""
    hooks = (*experiment.callbacks.values(), *experiment.algorithms.values())
    for section in filter(None, (experiment.folds, *hooks, experiment.scheduler)):
        build.once(passed, ("made", section), section.make)
    build.once(passed, ("made", experiment.optimizers), partial(build.make_optimizers, experiment.optimizers))
    experiment = without_data(experiment)
    model = ("made", experiment.model, experiment.init_weights)
    build.once(passed, model, partial(_make_model, experiment, runs_here))


def _make_model(experiment: Experiment, runs_here: bool) -> None:
    from runner.trials.dry_run import make_model_on_meta

    if make_model_on_meta(experiment) is None:
        try:
            build.make_model(experiment)
        except ConstructorFailed:
            if runs_here:  # other machines may have other devices
                raise


def _choices(override: Override) -> list[str]:
    """Return an override once for each of its swept values."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key = override.get_key_element()
    if not override.is_discrete_sweep():
        value = str(override.input_line).partition("=")[2]
        raise WrongKey(key_of(key), "needs a search, such as sweep=optuna_tpe; list values for a grid", value)
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _example(override: Override) -> str:
    """Return an override with one of its swept values."""
    key = override.get_key_element()
    value = override.value()
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{key}={value.start if isinstance(value, IntervalSweep) else next(override.sweep_string_iterator())}"
