"""Groups of runs to compare: selected by folders or conditions, paired by seeds, refused if not comparable.

Runs with the same seed, data and order of samples are true pairs: noise that they share cancels in their differences.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from runner.cli.verbs import TRAINING
from runner.comparing.conditions import choose, parse_conditions, to_number, to_text
from runner.comparing.decision import Samples, pair_values
from runner.comparing.foreign_results import MLFLOW, Columns, ForeignRun, read_mlflow, read_table
from runner.failures.errors import WrongKey
from runner.files.names import RESULT, SWEEP
from runner.records.listing import OUTPUTS, SavedFolder, find_runs
from runner.records.result import FOLD, SEED, Result, read_result
from runner.records.sweep_jobs import left_out
from runner.terminal.text import print_to_stderr
from runner.training.budget import Budget
from runner.training.metric_choice import metrics_named

TRAINED = (SEED, "model", "data", "folds", "optimizer", "scheduler", "trainer", "algorithms", "vars")
"""Sections of a config that change training; the others only observe, or choose the machine."""

UNTRAINED = ("callbacks", "launch", "sweep")
"""Config groups that do not change training."""

LARGEST = 1e100  # the largest value of a metric: sums of squares of larger ones overflow

NOTHING_NAMED = Columns()

Pair = tuple[str, ...]
"""The key by which runs of two candidates are paired: the seed, and the values of other keys."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run to compare; `config` has a value for each dotted key. A baseline is an untrained model."""

    saved: SavedFolder
    result: Result
    config: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Its folder; only a label if this project did not make the run."""
        return self.saved.folder

    @property
    def is_described(self) -> bool:
        """Whether this project recorded its evaluation and the length of its training."""
        return not isinstance(self.saved, ForeignRun) and not self.saved.is_own_loop

    @property
    def budget(self) -> str:
        """The length of its training, such as `5ep`, or `100ba of 64 samples`; 'none' for a baseline.

        It is empty if this project did not make the run, and the length is unknown.
        """
        if isinstance(self.saved, ForeignRun):
            return self.saved.budget
        if self.saved.is_baseline:
            return "none"
        if self.saved.is_own_loop:
            return f"{self.result.batches}ba"
        if (budget := self.config.get("budget")) is not None:
            return Budget.parse(budget).limit
        length = str(self.config.get("trainer.max_duration"))
        subset = self.config.get("trainer.train_subset_num_batches")
        is_of_batches = length.endswith("ba") or subset is not None
        part = f" of {subset}ba" if subset is not None else ""
        return f"{length}{part}" + f" of {self.config.get('data.batch_size')} samples" * is_of_batches


@dataclass(frozen=True)
class Candidate:
    """A group of runs to compare with others.

    Attributes:
        name: the text that selects the runs.
        runs: the runs that finished.
        left_out: the runs that did not finish.
    """

    name: str
    runs: list[FinishedRun]
    left_out: list[SavedFolder]

    @property
    def trained(self) -> list[SavedFolder]:
        """All its runs, finished or not."""
        return [*(run.saved for run in self.runs), *self.left_out]

    @property
    def missing(self) -> dict[str, int]:
        """The number of runs that did not finish, by status."""
        return dict(Counter(run.status for run in self.left_out))

    @cached_property
    def varying(self) -> dict[str, list[str]]:
        """The keys in which its runs differ, with their values as text, except keys that always equal the seed."""
        keys = {key for run in self.runs for key in run.config if key != SEED}
        varying = {}
        for key in sorted(keys):
            if all(run.config.get(key) == run.config.get(SEED) for run in self.runs):
                continue
            values = {to_text(run.config.get(key)) for run in self.runs}
            if len(values) > 1:
                varying[key] = sorted(values)
        return varying

    @property
    def choices(self) -> dict[str, list[str]]:
        """The config groups in which its runs made different choices, with these choices."""
        choices = [run.result.choices for run in self.runs]
        by_group = {group: sorted({chosen.get(group, "null") for chosen in choices}) for group in choices[0]}
        return {group: names for group, names in by_group.items() if len(names) > 1 and group not in UNTRAINED}

    def values(self, metric: str, keys: Sequence[str], among: Collection[Pair] = ()) -> dict[str, float]:
        """Return a metric of its runs by pairing key; if two runs have the same key, the later one counts.

        Folds of one seed train on largely the same samples and are not independent, so their mean is one value. Only
        the pairs in `among` count; all pairs if it is empty.
        """
        folds: dict[str, dict[Pair, float]] = {}
        runs: dict[Pair, FinishedRun] = {}
        for run in sorted(self.runs, key=lambda run: run.result.started):
            pair = pair_of(run, keys)
            if pair in (among or (pair,)):
                if isinstance(run.saved, ForeignRun) and (twice := runs.get(pair)) is not None:
                    names = f"{twice.folder} and {run.folder}"
                    raise ValueError(f"{self.name!r}: {names} have the same setting and seed; leave one of them out")
                runs[pair] = run
                shared = pair_of(run, [key for key in keys if key != FOLD])
                folds.setdefault(" ".join(shared), {})[pair] = run.result.metrics[metric]
        return {shared: math.fsum(values.values()) / len(values) for shared, values in folds.items()}


def pair_of(run: FinishedRun, keys: Sequence[str]) -> Pair:
    """Return the pairing key of a run: its seed and its values of other keys."""
    return tuple(to_text(run.config.get(key)) for key in (SEED, *keys))


def find_candidate(text: str, key: str, columns: Columns = NOTHING_NAMED, with_baselines: bool = False) -> Candidate:
    """Return the candidate whose runs a text selects; runs that trained nothing are left out, except baselines.

    Args:
        text: words, separated by spaces: folders of runs or sweeps, globs, files of results, and conditions such as
            `model=resnet8`. Conditions alone select from all runs in `outputs/` except forks. Or `mlflow:NAME`, an
            experiment in MLflow, perhaps followed by a filter in MLflow's language.
        key: the key that the text was typed for, for error messages.
        columns: the columns of results from elsewhere that the user named.
        with_baselines: whether baselines count too if there are trained runs.

    Raises:
        WrongKey: a word is neither a folder nor a condition, or no trained run is selected.
    """
    if text.startswith(MLFLOW):
        return make_candidate(text, read_mlflow(text, columns, key))
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise WrongKey(key, f"{error}", repr(text)) from None
    files = [Path(word) for word in words if Path(word).is_file()]
    folders_by_word = {word: [*_expand(word)] for word in words if Path(word) not in files}
    conditions = [word for word, folders in folders_by_word.items() if not folders]
    for word in conditions:
        if not re.search("[=<>]", word):
            allowed = "a folder of runs, a glob, a file of results, or a condition such as model=resnet8"
            raise WrongKey(key, f"no such folder; must be {allowed}; runner runs lists runs", repr(word))
    folders = [folder for matches in folders_by_word.values() for folder in matches]
    below = [run for folder in folders for run in _runs_in(folder)]
    below += [run for path in files for run in read_table(path, columns, key)]
    if not folders and not files:  # forks are left out: the first part of their training had another config
        results = [(run, run.result) for run in find_runs(Path(OUTPUTS))]
        below = [run for run, result in results if result is None or not result.parent]
    chosen = choose(below, parse_conditions(shlex.join(conditions), key), key)
    distinct = {run.identity: run for run in chosen}
    trained = [run for run in distinct.values() if run.verb in TRAINING or run.is_own_loop]
    if with_baselines or not trained:
        trained += [run for run in distinct.values() if run.is_baseline]
    if not trained:
        raise WrongKey(key, "no trained run; runner runs lists runs", repr(text))
    return make_candidate(text, trained)


def make_candidate(name: str, trained: Sequence[SavedFolder]) -> Candidate:
    """Return a candidate of runs that trained."""
    runs = [
        FinishedRun(run, run.result, run.config if isinstance(run, ForeignRun) else flatten(run))
        for run in trained
        if run.result is not None and run.status == "finished"
    ]
    runs.sort(key=lambda run: (to_number(run.config.get(SEED)) or 0.0, str(run.folder)))
    return Candidate(name, runs, [run for run in trained if run.status != "finished"])


def split(candidate: Candidate) -> list[Candidate]:
    """Return a candidate for each setting of results from elsewhere, in the order of their rows."""
    groups: dict[str, list[SavedFolder]] = {}
    foreign = [run for run in candidate.trained if isinstance(run, ForeignRun)]
    for run in sorted(foreign, key=lambda run: run.number):
        setting = shlex.join(f"{name}={value}" for name, value in run.result.choices.items())
        groups.setdefault(setting, []).append(run)
    return [make_candidate(f"{candidate.name} {name}".strip(), runs) for name, runs in groups.items()] or [candidate]


def _runs_in(folder: Path) -> Iterator[SavedFolder]:
    """Yield the run in a folder, or the runs below it; in a sweep, only its current jobs."""
    if (folder / RESULT).exists():
        yield SavedFolder(folder, read_result(folder))
        return
    excluded = left_out(folder) if (folder / SWEEP).exists() else []
    if excluded:
        names = ", ".join(path.name for path in excluded)
        print_to_stderr(f"INFO: left out, because they do not match the sweep {folder}: {names}")
    yield from (run for run in find_runs(folder) if run.folder not in excluded)


def describe_foreign(candidates: Sequence[Candidate]) -> list[tuple[str, str]]:
    """Return what was guessed about results from elsewhere, and a warning about facts that they lack."""
    runs = [run for candidate in candidates for run in candidate.runs]
    foreign = [run for run in runs if not run.is_described]
    saved = [run.saved for run in foreign]
    guesses = [run.guess for run in saved if isinstance(run, ForeignRun) and run.guess]
    rows = [("guessed", guess) for guess in dict.fromkeys(guesses)]
    is_mixed = 0 < len(foreign) < len(runs)
    data = [run.data if isinstance(run, ForeignRun) else "" for run in saved]
    facts = {"evaluation data": data, "training length": [run.budget for run in foreign]}
    unknown = [fact for fact, values in facts.items() if is_mixed or not all(values)]
    if foreign and unknown:
        verb = "are" if len(unknown) > 1 else "is"
        rows.append(("warning", f"{' and '.join(unknown)} {verb} unknown: make sure that they are the same"))
    return rows


def common_metric(candidates: Sequence[Candidate], requested: str, key: str, better: str = "auto") -> tuple[str, bool]:
    """Return the metric by which candidates are compared, and whether smaller values of it are better.

    Args:
        candidates: the candidates, whose runs must all have a finite value of the metric.
        requested: a metric, such as `eval/loss` or `loss`; if it is empty, the objective of the runs is used.
        key: the key with which the metric was requested, for error messages.
        better: `lower` or `higher` values are better; `auto` follows the runs, or else the metric's name.
    """
    runs = [run for candidate in candidates for run in candidate.runs]
    objectives = dict.fromkeys(run.result.objective_name for run in runs)
    if not requested and (len(objectives) > 1 or "" in objectives):
        shown = [name for name in objectives if name] or dict.fromkeys(
            name for run in runs for name in run.result.metrics
        )
        raise WrongKey(key, f"the runs have no objective in common ({', '.join(shown)}); name a metric")
    name = requested or next(iter(objectives))
    metric = next(iter(metrics_named(name, runs[0].result.metrics)), name)
    for run in runs:
        value = run.result.metrics.get(metric)
        if value is None or not abs(value) <= LARGEST:
            has = ", ".join(run.result.metrics) or "none"
            raise WrongKey(key, f"{run.folder} has no finite value for it; its metrics: {has}", repr(metric))
    result = runs[0].result
    if better != "auto":
        return metric, better == "lower"
    return metric, metric in result.lower or (metric == result.objective_name and result.lower_is_better)


def pair_up(a: Candidate, b: Candidate, metric: str, key: str, allows_budget: bool = False) -> Samples:
    """Return the values of two candidates as samples, paired if their runs share seeds."""
    keys = pairing_keys(a, b, key)
    check_comparable(a, b, metric, keys, allows_budget)
    shared = {pair_of(run, keys) for run in a.runs} & {pair_of(run, keys) for run in b.runs} if FOLD in keys else ()
    return pair_values(a.values(metric, keys, shared), b.values(metric, keys, shared))


def pairing_keys(a: Candidate, b: Candidate, key: str) -> list[str]:
    """Return the keys besides the seed by which the runs of two candidates are paired: keys that vary in both."""
    for candidate, other in ((a, b), (b, a)):
        unshared = [name for name in candidate.varying if name not in other.varying]
        if unshared:
            varying = candidate.choices or {unshared[0]: candidate.varying[unshared[0]]}
            name, values = next(iter(varying.items()))
            shown = f"{name} is {' and '.join(values[:3])}{' and others' * (len(values) > 3)}"
            fix = f"choose one setting, as in '{candidate.name} {name}={values[0]}'"
            raise WrongKey(key, f"its runs differ in more than the seed: {shown}; {fix}", repr(candidate.name))
    return [*a.varying]


def check_comparable(a: Candidate, b: Candidate, metric: str, pairing: Sequence[str], allows_budget: bool) -> None:
    """Check that two candidates were evaluated in the same way, and trained for the same length."""
    folders = {run.saved.identity: run.folder for run in a.runs}
    if shared := [(folders[run.saved.identity], run.folder) for run in b.runs if run.saved.identity in folders]:
        own, other = min(shared)
        copy = "" if own.resolve() == other.resolve() else f", of which {other} is a copy by its {RESULT}"
        raise ValueError(f"both {a.name!r} and {b.name!r} contain the run {own}{copy}")
    foreign = [run for run in (*a.runs, *b.runs) if not run.is_described]
    if 0 < len(foreign) < len(a.runs) + len(b.runs):  # facts of other forms, see `describe_foreign`
        return
    evaluations = [{pair_of(run, pairing): run.result.evaluated_by(metric) for run in side.runs} for side in (a, b)]
    pairs = evaluations[0].keys() & evaluations[1].keys()
    for what in evaluations[0][pair_of(a.runs[0], pairing)]:
        if foreign and not all(facts[what] for side in evaluations for facts in side.values()):
            continue  # it is unknown
        first, second = ({pair: str(facts[what]) for pair, facts in side.items()} for side in evaluations)
        if any(first[pair] != second[pair] for pair in pairs) or not (pairs or {*first.values()} & {*second.values()}):
            shown = " and ".join(", ".join(sorted({*values.values()})) for values in (first, second))
            reason = f"their evaluation differs in its {what}: {shown}"
            raise ValueError(f"{a.name!r} and {b.name!r} cannot be compared by {metric}: {reason}")
    budgets = [{run.budget for run in side.runs} for side in (a, b)]
    is_known = "" not in budgets[0] | budgets[1]
    allows_budget = allows_budget or not is_known or {"none"} in budgets  # a baseline has no length of training
    if budgets[0] != budgets[1] and not allows_budget:
        shown = " and ".join(", ".join(sorted(limits)) for limits in budgets)
        fix = "runner verdict compares them with --budget any"
        raise ValueError(f"{a.name!r} and {b.name!r} have different budgets: {shown}; {fix}")


def find_differences(a: Candidate, b: Candidate) -> list[tuple[str, str, str]]:
    """Return the differences between two candidates, with both values: first choices of groups, then other keys."""
    first = a.runs[0]
    second = b.runs[0]
    choices = first.result.choices, second.result.choices
    groups = [group for group in dict.fromkeys([*choices[0], *choices[1]]) if group not in UNTRAINED]
    rows = [(group, choices[0].get(group, "null"), choices[1].get(group, "null")) for group in groups]
    rows = [row for row in rows if row[1] != row[2]]
    listed = {group for group, *_ in rows}
    if first.saved.is_baseline != second.saved.is_baseline:
        rows.insert(0, ("training", first.budget, second.budget))
    varying = {SEED, *a.varying, *b.varying}
    for key in dict.fromkeys([*first.config, *second.config]):
        values = first.config.get(key), second.config.get(key)
        are_seeds = values == (first.config.get(SEED), second.config.get(SEED))
        if values[0] != values[1] and key not in varying and key.partition(".")[0] not in listed and not are_seeds:
            rows.append((key, to_text(values[0]), to_text(values[1])))
    return rows


def _expand(word: str) -> Iterator[Path]:
    """Yield the folders that a word names: itself, or the matches of a glob."""
    if Path(word).is_dir():
        yield Path(word)
    elif has_magic(word):
        yield from (Path(match) for match in sorted(glob(word)) if Path(match).is_dir())


def flatten(run: SavedFolder) -> dict[str, Any]:
    """Return the part of a run's config that affects training, by dotted key; all of it for a user's own loop."""
    flat: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, child in value.items():
                add(f"{key}.{name}", child)
        else:
            flat[key] = value

    for section in run.sections if run.is_own_loop else TRAINED:
        if (value := run.section(section)) is not None:
            add(section, value)
    return flat
