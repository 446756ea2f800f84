"""Groups of runs to compare: selected by folders or conditions, paired by seeds, refused if not comparable.

Runs that share seed, data and order of samples are true pairs: what they have in common cancels in their differences.
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
from runner.failures.errors import WrongKey
from runner.files.names import RESULT, SWEEP
from runner.records.listing import OUTPUTS, SavedFolder, find_runs
from runner.records.result import FOLD, SEED, Result, read_result
from runner.records.sweep_jobs import left_out
from runner.terminal.text import print_to_stderr
from runner.training.budget import Budget
from runner.training.metric_choice import metrics_named

TRAINED = (SEED, "model", "data", "folds", "optimizer", "scheduler", "trainer", "algorithms", "vars")
"""Sections of a config that make runs different; the others only observe, or control where they run."""

UNTRAINED = ("callbacks", "launch", "sweep")
"""Config groups that are not among these sections."""

LARGEST = 1e100  # of a metric: sums of squares of larger values overflow

Pair = tuple[str, ...]
"""The key for pairing runs of two candidates: the seed, and the values of other keys."""


@dataclass(frozen=True)
class Run:
    """A finished run that is compared, with its config by dotted key."""

    folder: Path
    result: Result
    config: Mapping[str, Any]

    @property
    def budget(self) -> str:
        """The length of its training, such as `5ep`, or `100ba of 64 samples`."""
        if (budget := self.config.get("budget")) is not None:
            return Budget.parse(budget).limit
        length = str(self.config.get("trainer.max_duration"))
        subset = self.config.get("trainer.train_subset_num_batches")
        is_of_batches = length.endswith("ba") or subset is not None
        part = f" of {subset}ba" if subset is not None else ""
        return f"{length}{part}" + f" of {self.config.get('data.batch_size')} samples" * is_of_batches


@dataclass(frozen=True)
class Candidate:
    """One of the things that are compared, and its runs.

    Its name is the text that selects its runs; `left_out` are those that have not finished.
    """

    name: str
    runs: list[Run]
    left_out: list[SavedFolder]

    @property
    def missing(self) -> dict[str, int]:
        """How many of its runs did not end well, by status."""
        return dict(Counter(one.status for one in self.left_out))

    @cached_property
    def varying(self) -> dict[str, list[str]]:
        """The keys in which its runs differ, each with its values as text. Keys that repeat the seed are left out."""
        keys = {key for run in self.runs for key in run.config if key != SEED}
        found = {}
        for key in sorted(keys):
            if all(run.config.get(key) == run.config.get(SEED) for run in self.runs):
                continue
            values = {to_text(run.config.get(key)) for run in self.runs}
            if len(values) > 1:
                found[key] = sorted(values)
        return found

    @property
    def choices(self) -> dict[str, list[str]]:
        """The config groups in which its runs made different choices, with these choices."""
        named = [run.result.choices for run in self.runs]
        found = {group: sorted({one.get(group, "null") for one in named}) for group in dict.fromkeys(named[0])}
        return {group: values for group, values in found.items() if len(values) > 1 and group not in UNTRAINED}

    def values(self, metric: str, keys: Sequence[str], among: Collection[Pair] = ()) -> dict[str, float]:
        """Return a metric of its runs by pairing key; if two runs have the same key, the later one counts.

        Folds of one seed train on largely the same samples, so they are not independent: their mean is one value. Only
        the pairs in `among` count; all if it is empty.
        """
        found: dict[str, dict[Pair, float]] = {}
        for run in sorted(self.runs, key=lambda run: run.result.started):
            pair = pair_of(run, keys)
            if pair in (among or (pair,)):
                shared = pair_of(run, [key for key in keys if key != FOLD])
                found.setdefault(" ".join(shared), {})[pair] = run.result.metrics[metric]
        return {shared: math.fsum(folds.values()) / len(folds) for shared, folds in found.items()}


def pair_of(run: Run, keys: Sequence[str]) -> Pair:
    """Return the seed of a run and its values of other keys, by which it is paired."""
    return tuple(to_text(run.config.get(key)) for key in (SEED, *keys))


def find_candidate(text: str, key: str) -> Candidate:
    """Return the runs that a text names.

    Args:
        text: words, separated by blanks: folders of runs or sweeps, globs, and conditions such as `model=resnet8`.
            Without a folder the conditions are on all runs in `outputs/` but forks. A run that trained nothing is left
            out.
        key: the key that it was typed for, for error messages.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise WrongKey(key, f"{error}", repr(text)) from None
    places = {word: [*_expand(word)] for word in words}
    conditions = [word for word, paths in places.items() if not paths]
    for word in conditions:
        if not re.search("[=<>]", word):
            allowed = "a folder of runs, a glob, or a condition such as model=resnet8"
            raise WrongKey(key, f"no such folder; must be {allowed}; runner runs lists runs", repr(word))
    folders = [path for paths in places.values() for path in paths]
    below = [run for path in folders for run in _runs_in(path)]
    if not folders:  # the config of a fork is not what the first part of its training had
        known = [(one, one.result) for one in find_runs(Path(OUTPUTS))]
        below = [one for one, result in known if result is None or not result.parent]
    found = choose(below, parse_conditions(shlex.join(conditions), key), key)
    known = {_identity(one.folder): one for one in found}
    trained = [one for one in known.values() if one.verb in TRAINING]
    if not trained:
        raise WrongKey(key, "no trained run; runner runs lists runs", repr(text))
    runs = [
        Run(one.folder, one.result, _flat(one))
        for one in trained
        if one.result is not None and one.status == "finished"
    ]
    runs.sort(key=lambda run: (to_number(run.config.get(SEED)) or 0.0, str(run.folder)))
    return Candidate(text, runs, [one for one in trained if one.status != "finished"])


def _identity(folder: Path) -> tuple[int, int]:
    """Return the device and inode of a folder, which are the same for every link and path to it."""
    state = folder.stat()
    return state.st_dev, state.st_ino


def _runs_in(folder: Path) -> Iterator[SavedFolder]:
    """Yield the run in a folder, or those below it; of a sweep only its jobs."""
    if (folder / RESULT).exists():
        yield SavedFolder(folder, read_result(folder))
        return
    others = left_out(folder) if (folder / SWEEP).exists() else []
    if others:
        names = ", ".join(one.name for one in others)
        print_to_stderr(f"INFO: left out, because they are not what the sweep {folder} asks for: {names}")
    yield from (run for run in find_runs(folder) if run.folder not in others)


def common_metric(candidates: Sequence[Candidate], asked: str, key: str) -> tuple[str, bool]:
    """Return the metric that candidates are compared by, and whether a smaller value of it is better.

    `asked` is a metric, such as `eval/loss` or `loss`; if it is empty, the objective of the runs counts.
    """
    runs = [run for one in candidates for run in one.runs]
    objectives = dict.fromkeys(run.result.objective_name for run in runs)
    if not asked and (len(objectives) > 1 or "" in objectives):
        raise WrongKey(key, f"the runs have no objective in common ({', '.join(objectives)}); name a metric")
    name = asked or next(iter(objectives))
    metric = next(iter(metrics_named(name, runs[0].result.metrics)), name)
    for run in runs:
        value = run.result.metrics.get(metric)
        if value is None or not abs(value) <= LARGEST:
            has = ", ".join(run.result.metrics) or "none"
            raise WrongKey(key, f"{run.folder} has no finite value for it; its metrics: {has}", repr(metric))
    result = runs[0].result
    return metric, metric in result.lower or (metric == result.objective_name and result.lower_is_better)


def pair_up(a: Candidate, b: Candidate, metric: str, key: str, allows_budget: bool = False) -> Samples:
    """Return the values of two candidates, in pairs if their runs share seeds."""
    keys = pairing_keys(a, b, key)
    check_comparable(a, b, metric, keys, allows_budget)
    both = {pair_of(run, keys) for run in a.runs} & {pair_of(run, keys) for run in b.runs} if FOLD in keys else ()
    return pair_values(a.values(metric, keys, both), b.values(metric, keys, both))


def pairing_keys(a: Candidate, b: Candidate, key: str) -> list[str]:
    """Return the keys besides the seed by which the runs of two candidates are paired: keys that vary in both."""
    for one, other in ((a, b), (b, a)):
        alone = [name for name in one.varying if name not in other.varying]
        if alone:
            values = one.choices or {alone[0]: one.varying[alone[0]]}
            name, found = next(iter(values.items()))
            shown = f"{name} is {' and '.join(found[:3])}{' and others' * (len(found) > 3)}"
            fix = f"choose one setting, as in '{one.name} {name}={found[0]}'"
            raise WrongKey(key, f"its runs differ in more than the seed: {shown}; {fix}", repr(one.name))
    return [*a.varying]


def check_comparable(a: Candidate, b: Candidate, metric: str, pairing: Sequence[str], allows_budget: bool) -> None:
    """Check that two candidates were evaluated in the same way, and trained for the same length."""
    folders = {_identity(run.folder): run.folder for run in a.runs}
    if shared := [folders[place] for run in b.runs if (place := _identity(run.folder)) in folders]:
        raise ValueError(f"both {a.name!r} and {b.name!r} contain the run {min(shared)}")
    found = [{pair_of(run, pairing): run.result.evaluated_by(metric) for run in one.runs} for one in (a, b)]
    pairs = found[0].keys() & found[1].keys()
    for what in found[0][pair_of(a.runs[0], pairing)]:
        first, second = ({pair: str(facts[what]) for pair, facts in one.items()} for one in found)
        if any(first[pair] != second[pair] for pair in pairs) or not (pairs or {*first.values()} & {*second.values()}):
            shown = " and ".join(", ".join(sorted({*one.values()})) for one in (first, second))
            reason = f"their evaluation differs in its {what}: {shown}"
            raise ValueError(f"{a.name!r} and {b.name!r} cannot be compared by {metric}: {reason}")
    budgets = [{run.budget for run in one.runs} for one in (a, b)]
    if budgets[0] != budgets[1] and not allows_budget:
        shown = " and ".join(", ".join(sorted(one)) for one in budgets)
        fix = "runner verdict compares them with --budget any"
        raise ValueError(f"{a.name!r} and {b.name!r} have different budgets: {shown}; {fix}")


def find_differences(a: Candidate, b: Candidate) -> list[tuple[str, str, str]]:
    """Return what differs between two candidates, with both values: choices of groups, then keys outside of these."""
    first = a.runs[0]
    second = b.runs[0]
    choices = first.result.choices, second.result.choices
    groups = [one for one in dict.fromkeys([*choices[0], *choices[1]]) if one not in UNTRAINED]
    rows = [(one, choices[0].get(one, "null"), choices[1].get(one, "null")) for one in groups]
    rows = [row for row in rows if row[1] != row[2]]
    told = {group for group, *_ in rows}
    varying = {SEED, *a.varying, *b.varying}
    for key in dict.fromkeys([*first.config, *second.config]):
        values = first.config.get(key), second.config.get(key)
        are_seeds = values == (first.config.get(SEED), second.config.get(SEED))
        if values[0] != values[1] and key not in varying and key.partition(".")[0] not in told and not are_seeds:
            rows.append((key, to_text(values[0]), to_text(values[1])))
    return rows


def _expand(word: str) -> Iterator[Path]:
    """Yield the folders that a word names: itself, or the matches of a glob."""
    if Path(word).is_dir():
        yield Path(word)
    elif has_magic(word):
        yield from (Path(one) for one in sorted(glob(word)) if Path(one).is_dir())


def _flat(run: SavedFolder) -> dict[str, Any]:
    """Return the part of a run's config that affects training, by dotted key."""
    flat: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, one in value.items():
                add(f"{key}.{name}", one)
        else:
            flat[key] = value

    for section in TRAINED:
        if (value := run.section(section)) is not None:
            add(section, value)
    return flat
