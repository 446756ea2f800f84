"""Sweeps whose jobs are chosen by Optuna: the directions of objectives, and continuing a stored study."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner.cli.nearest import nearest
from runner.config.section import Section
from runner.failures.errors import WrongKey
from runner.records.result import Result, objectives_of

if TYPE_CHECKING:
    import optuna

DIRECTIONS = ("minimize", "maximize")


def is_optuna(config: DictConfig) -> bool:
    """Return whether the sweeper is Optuna's."""
    return "optuna" in config.hydra.sweeper._target_


def silence_optuna() -> None:
    """Silence Optuna's own log messages, and its warnings that its Hydra sweeper uses deprecated names."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"(?s).*github\.com/optuna/optuna/")


def read_directions(config: DictConfig) -> list[str]:
    """Return the direction of each objective; empty if the sweeper needs none."""
    sweeper = config.hydra.sweeper
    if "pruner" in sweeper:
        remedy = "+callbacks=sweep_pruner callbacks.sweep_pruner.pruner=median prunes jobs, with any sweeper"
        raise WrongKey("hydra.sweeper.pruner", f"the sweeper has none; {remedy}", repr(sweeper.pruner))
    value = sweeper.get("direction")
    if value is None:
        return []
    values = value if not isinstance(value, str) and isinstance(value, Sequence) else [value]
    directions = [str(getattr(value, "name", value)) for value in values]
    for direction in directions:
        if direction not in DIRECTIONS:
            raise WrongKey("hydra.sweeper.direction", nearest(direction, DIRECTIONS), repr(direction))
    names = objectives_of(config.objective) or ["the metric"]
    if len(names) != len(directions):
        listed = ",".join("minimize" for _ in names)
        example = listed if len(names) == 1 else f"[{listed}]"
        reason = f"needs a direction for each objective, {' and '.join(names)}: hydra.sweeper.direction={example}"
        raise WrongKey("hydra.sweeper.direction", reason, ",".join(directions))
    return directions


def resume_study(config: DictConfig, name: str, ended: Sequence[Result], unfinished: Sequence[Result]) -> None:
    """Let Optuna's sweeper continue the study in its storage, as if it had never stopped.

    Jobs that have ended count as trials of this sweep, and interrupted ones are enqueued again. The config gets the
    name of the study, the remaining number of trials, and another seed of the sampler, so that it draws new values.
    Without a storage nothing changes: a seeded search repeats itself, and skips the jobs that have ended.
    """
    import optuna

    sweeper = config.hydra.sweeper
    if sweeper.get("storage") is None:
        return
    with read_write(config), open_dict(config):
        sweeper.study_name = sweeper.get("study_name") or name
        sweeper.n_trials = max(0, sweeper.n_trials - len(ended))
        storage = sweeper.storage
        if isinstance(storage, Mapping):
            storage = Section("hydra.sweeper.storage", storage).make()
        try:
            study = optuna.load_study(study_name=sweeper.study_name, storage=storage)
        except KeyError:
            return  # a new study
        if OmegaConf.select(sweeper, "sampler.seed") is not None:
            sweeper.sampler.seed += len(study.trials)
    for result in unfinished:
        _enqueue_again(study, result)


def _enqueue_again(study: optuna.Study, result: Result) -> None:
    """Enqueue the parameters of a job whose trial was interrupted."""
    import optuna

    overrides = {*result.overrides}
    parameters = [(trial, {f"{key}={value}" for key, value in trial.params.items()}) for trial in study.trials]
    trials = [trial for trial, params in parameters if params and params <= overrides]
    for trial in trials:
        if trial.state in (optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.WAITING):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    if trials:
        study.enqueue_trial(trials[-1].params)
