"""Keeps the results of a sweep's jobs in an Optuna study, in a journal that the jobs share. For rank 0 only."""

from __future__ import annotations

import inspect
import json
import math
import os
import statistics
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState, create_trial

from runner.files.lock import PATIENCE, lock_file

JOURNAL = "pruning.journal"
NAME = "pruning"
LONGEST_LINE = 65_536  # bytes
PRUNERS = {
    "median": optuna.pruners.MedianPruner,
    "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "wilcoxon": optuna.pruners.WilcoxonPruner,
}
# One evaluation. Optuna's default, a hundredth of the first job's evaluations, is unknown until that job ends.
DEFAULTS: dict[str, dict[str, Any]] = {"successive_halving": {"min_resource": 1}}


def make_pruner(name: str, options: Mapping[str, Any]) -> optuna.pruners.BasePruner:
    """Return one of Optuna's pruners."""
    known = inspect.signature(PRUNERS[name]).parameters
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"{PRUNERS[name].__name__} has no {', '.join(unknown)}; it takes {', '.join(known)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return PRUNERS[name](**{**DEFAULTS.get(name, {}), **options})


class PruningStudy:
    """A job's view of its sweep's study, which has a trial for each job. A resumed job keeps its trial.

    `setting` is everything that distinguishes the job from others, except the seed.

    Raises:
        OSError: the journal cannot be read or written.
        TimeoutError: another process keeps the journal locked.
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        setting: str,
        seed: int,
        pruner: optuna.pruners.BasePruner,
        lower_is_better: bool,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(_Journal(folder / JOURNAL))
        self._direction: Literal["minimize", "maximize"] = "minimize" if lower_is_better else "maximize"
        self._study = optuna.create_study(
            storage=storage,
            sampler=optuna.samplers.RandomSampler(),  # nothing is sampled
            pruner=pruner,
            study_name=NAME,
            direction=self._direction,
            load_if_exists=True,
        )
        self._setting = setting
        trials = self._study.get_trials(deepcopy=False)
        number = next((trial.number for trial in trials if trial.user_attrs.get("job") == job), None)
        if number is not None:
            study_id = storage.get_study_id_from_name(NAME)
            trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, number)
            self._trial = optuna.trial.Trial(self._study, trial_id)
        else:
            self._trial = self._study.ask()
            for key, value in {"job": job, "setting": setting, "seed": seed}.items():
                self._trial.set_user_attr(key, value)
        self._steps = {*self._frozen.intermediate_values}

    @property
    def _frozen(self) -> optuna.trial.FrozenTrial:
        return self._study.get_trials(deepcopy=False)[self._trial.number]

    @property
    def was_pruned(self) -> bool:
        """Whether the job was pruned in an earlier session."""
        return self._frozen.state is TrialState.PRUNED

    def should_prune(self, value: float, step: int) -> bool:
        """Report the value of an evaluation, and return whether the job should be pruned.

        `step` counts the job's evaluations from 1. An evaluation that was reported before keeps its value.
        """
        if step not in self._steps:
            self._trial.report(value, step)
            self._steps.add(step)
        return self._trial.should_prune()

    def should_prune_setting(self) -> bool:
        """Return whether the job's setting is worse than the best one, compared over the seeds that it has finished."""
        values: dict[str, dict[int, float]] = {}
        for trial in self._study.get_trials(states=(TrialState.COMPLETE,)):
            values.setdefault(trial.user_attrs["setting"], {})[trial.user_attrs["seed"]] = float(trial.value or 0.0)
        own = values.pop(self._setting, {})
        settings = optuna.create_study(sampler=self._study.sampler, direction=self._direction)
        for other in values.values():
            if own and own.keys() <= other.keys():
                shared = {seed: other[seed] for seed in own}
                mean = statistics.fmean(shared.values())
                settings.add_trial(create_trial(value=mean, intermediate_values=shared))
        return self._study.pruner.prune(settings, create_trial(state=TrialState.RUNNING, intermediate_values=own))

    def finish(self, value: float | None) -> None:
        """Record that the job has finished, with a value that may be None or not finite."""
        is_known = value is not None and math.isfinite(value)
        state = TrialState.COMPLETE if is_known else TrialState.FAIL
        self._study.tell(self._trial.number, value if is_known else None, state=state, skip_if_finished=True)

    def prune(self) -> None:
        """Record that the job has been pruned."""
        self._study.tell(self._trial.number, state=TrialState.PRUNED, skip_if_finished=True)


class _Journal(JournalFileBackend):
    """A journal in a file. If a process is killed, its lock is released, and others can still read the journal."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append lines, after removing a half-written line left by a killed process.

        Unlike Optuna's journal, this one does not sync lines, which would wait for the disk about twenty times per job.
        After a power cut, a job may therefore begin a new trial.

        Raises:
            OSError: the file cannot be written.
            TimeoutError: another process keeps the journal locked.
        """
        lock = lock_file(self._path.with_name(f".{self._path.name}.lock"), PATIENCE)
        if lock is None:
            raise TimeoutError(f"{self._path}: another process has held it for {PATIENCE:g} s")
        with lock, self._path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - LONGEST_LINE))
            tail = file.read()
            file.seek(end - len(tail) + tail.rfind(b"\n") + 1)
            file.truncate()
            file.write("".join(json.dumps(entry) + "\n" for entry in logs).encode())
