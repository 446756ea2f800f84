"""The settings of a sweep, ranked by their means. Jobs that differ only in seed or fold are one setting."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.records.result import FOLD, SEED, Result
from runner.sweeps.names import describe, short_names, show_value, swept_values
from runner.sweeps.sweep import Sweep

Table = tuple[list[str], list[list[Any]]]
SHOWN_TIES = 3
REPEATED = (SEED, FOLD)
"""Keys that repeat a setting: jobs that differ in no other key are the same setting."""


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep.

    Attributes:
        result: its result.
        values: its swept values by key.
        score: the objective, negated if higher is better, so that lower scores are better; infinite without one.
    """

    result: Result
    values: dict[str, Any]
    score: float

    @property
    def has_objective(self) -> bool:
        """Whether it has a finite objective."""
        return math.isfinite(self.score)


@dataclass(frozen=True)
class Setting:
    """The jobs of a sweep that differ only in seed or fold.

    Attributes:
        values: the swept values that the jobs share, by key.
        jobs: the jobs, ordered by seed and fold.
        verdict: 'best' or 'leads' for the first setting, 'tied' for others that may be the best as well, 'worse', or
            empty if the jobs do not allow a verdict.
    """

    values: dict[str, Any]
    jobs: list[SweepJob]
    verdict: str = ""

    @property
    def name(self) -> str:
        """The values as text, such as `lr=0.01 model=mlp`; 'all runs' if only seeds and folds are swept."""
        return describe(self.values) or "all runs"

    @property
    def measured(self) -> list[SweepJob]:
        """The jobs that have an objective."""
        return [job for job in self.jobs if job.has_objective]

    @property
    def scores(self) -> dict[str, float]:
        """The scores by seed, averaged over the folds of each seed, for pairing with other settings."""
        by_seed: dict[str, list[float]] = {}
        for job in self.measured:
            by_seed.setdefault(repr(job.values.get(SEED)), []).append(job.score)
        return {seed: statistics.fmean(scores) for seed, scores in by_seed.items()}

    @property
    def is_complete(self) -> bool:
        """Whether all its jobs have an objective."""
        return len(self.measured) == len(self.jobs)

    @property
    def objectives(self) -> list[float]:
        """The objectives of the jobs that have an objective."""
        return [job.result.objective for job in self.measured if job.result.objective is not None]

    @property
    def mean(self) -> float | None:
        """The mean objective; None if no job has one."""
        return statistics.fmean(self.objectives) if self.objectives else None

    @property
    def spread(self) -> float | None:
        """The sample standard deviation of the objective; None with fewer than two values."""
        return statistics.stdev(self.objectives) if len(self.objectives) > 1 else None

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The sort key of settings: those whose jobs all have an objective come first, then those with better means.

        Otherwise a setting that diverges with most seeds could win with its last remaining one.
        """
        scores = [job.score for job in self.measured]
        return not scores, not self.is_complete, statistics.fmean(scores) if scores else 0.0

    def average(self, metric: str) -> float | None:
        """Return the mean of a metric over the jobs that have an objective; None if no job has the metric."""
        values = [job.result.metrics[metric] for job in self.measured if metric in job.result.metrics]
        return statistics.fmean(values) if values else None

    def describe_missing(self) -> str:
        """Return the outcomes of jobs without an objective, such as '1 failed, 2 not finite'; empty if all have one."""
        statuses = [job.result.status.lower() for job in self.jobs if not job.has_objective]
        missing = Counter("not finite" if status == "finished" else status for status in statuses)
        return ", ".join(f"{count} {status}" for status, count in missing.items())


def rank_jobs(results: Sequence[Result], sweep: Sweep) -> list[SweepJob]:
    """Return the jobs with these results, best first."""
    jobs = []
    for result in results:
        lower = sweep.direction == "minimize" if sweep.direction else result.lower_is_better
        value = result.objective
        score = math.inf
        if value is not None and not math.isnan(value) and result.status == "FINISHED":
            score = value if lower else -value
        jobs.append(SweepJob(result, swept_values(result.overrides, sweep.fixed), score))
    return sorted(jobs, key=lambda job: (job.score, job.result.name))


def group_jobs(jobs: Sequence[SweepJob]) -> list[Setting]:
    """Return the settings of jobs, best first, with their verdicts."""
    groups: dict[str, list[SweepJob]] = {}
    for job in jobs:
        groups.setdefault(repr(sorted(_shared_values(job).items())), []).append(job)
    settings = [Setting(_shared_values(group[0]), sorted(group, key=_repetition)) for group in groups.values()]
    return judge(sorted(settings, key=lambda setting: (setting.rank, setting.name)))


def judge(settings: Sequence[Setting]) -> list[Setting]:
    """Return settings, sorted best first, with verdicts on which of them may have the best true mean."""
    leader, *followers = settings
    judged = [setting for setting in followers if setting.is_complete and _are_evaluated_alike(leader, setting)]
    if not judged or not leader.is_complete or len(leader.scores) < 2:
        return [*settings]
    from runner.comparing.decision import find_ties, pair_values  # here, because numpy takes a tenth of a second

    ties = find_ties([pair_values(leader.scores, setting.scores) for setting in judged])
    verdicts = {setting.name: "tied" if is_tied else "worse" for setting, is_tied in zip(judged, ties, strict=True)}
    verdicts[leader.name] = "leads" if any(ties) else "best"
    return [replace(setting, verdict=verdicts.get(setting.name, "")) for setting in settings]


def describe_ties(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield a line with the settings that may be as good as the first, and the number of seeds that could decide."""
    tied = [setting.name for setting in settings if setting.verdict == "tied"]
    if not tied:
        return
    names = list_first(tied)
    compared = sum(bool(setting.verdict) for setting in settings) - 1
    from runner.comparing.decision import LEVEL, count_needed

    least = count_needed(math.inf, LEVEL / compared)
    n = len(settings[0].scores)
    too_few = f"; {n} seeds cannot tell {compared + 1} settings apart, {least} can" if least and n < least else ""
    yield f"{names} may be as good{too_few}"


def list_first(names: Sequence[str]) -> str:
    """Return the first few names, and the number of further ones."""
    return ", ".join(names[:SHOWN_TIES]) + (f" and {len(names) - SHOWN_TIES} more" if len(names) > SHOWN_TIES else "")


def objective_name(jobs: Sequence[SweepJob]) -> str:
    """Return the metric by which jobs are compared; empty if no job has one."""
    return next((job.result.objective_name for job in jobs if job.result.objective_name), "")


def lower_is_better(jobs: Sequence[SweepJob], sweep: Sweep) -> bool:
    """Return whether smaller objectives are better, according to the sweeper, or else to the metric."""
    return sweep.direction == "minimize" if sweep.direction else any(job.result.lower_is_better for job in jobs)


def metrics_of(jobs: Sequence[SweepJob]) -> list[str]:
    """Return the metrics of jobs except the objective, those of evaluators first."""
    names = {name for job in jobs for name in job.result.metrics} - {objective_name(jobs)}
    return sorted(names, key=lambda name: (name.startswith("train/"), name))


def tabulate_settings(settings: Sequence[Setting], metrics: Sequence[str]) -> Table:
    """Return columns and rows: for each setting its values, mean, spread, number of seeds, metrics and mean time."""
    jobs = [job for setting in settings for job in setting.jobs]
    shorts = short_names(sorted({key for setting in settings for key in setting.values}))
    objective = objective_name(jobs) or "objective"
    columns = [*shorts.values(), objective, "spread", "n", "verdict", *metrics, "seconds", "missing"]
    rows = [
        [
            *(_cell(setting.values.get(key)) for key in shorts),
            setting.mean,
            setting.spread,
            len(setting.objectives),
            setting.verdict,
            *(setting.average(metric) for metric in metrics),
            round(statistics.fmean(job.result.seconds for job in setting.jobs), 2),
            setting.describe_missing(),
        ]
        for setting in settings
    ]
    return columns, rows


def tabulate_jobs(jobs: Sequence[SweepJob]) -> Table:
    """Return columns and rows: for each job its swept values, all its metrics, its time in seconds and its status."""
    shorts = short_names(sorted({key for job in jobs for key in job.values}))
    metrics = [name for name in (objective_name(jobs), *metrics_of(jobs)) if name]
    columns = ["job", *shorts.values(), *metrics, "seconds", "status"]
    rows = [
        [
            job.result.name,
            *(_cell(job.values.get(key)) for key in shorts),
            *(job.result.metrics.get(name) for name in metrics),
            round(job.result.seconds, 2),
            job.result.status,
        ]
        for job in jobs
    ]
    return columns, rows


def without_empty(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table without the columns in which no row has a value."""
    indices = [index for index in range(len(columns)) if any(row[index] not in (None, "") for row in rows)]
    return [columns[index] for index in indices], [[row[index] for index in indices] for row in rows]


def _shared_values(job: SweepJob) -> dict[str, Any]:
    return {key: value for key, value in job.values.items() if key not in REPEATED}


def _are_evaluated_alike(a: Setting, b: Setting) -> bool:
    """Return whether jobs with equal seeds and folds were evaluated on the same data, by the same metric."""
    name = objective_name(a.jobs)
    first, second = ({_repetition(job): job.result.evaluated_by(name) for job in side.measured} for side in (a, b))
    return all(first[repetition] == second[repetition] for repetition in first.keys() & second.keys())


def _repetition(job: SweepJob) -> tuple[float | str, ...]:
    """Return the facts that distinguish a job from the others of its setting: seed and fold, or else its name."""
    numbers = [job.values[key] for key in REPEATED if isinstance(job.values.get(key), int)]
    return (*numbers,) if numbers else (math.inf, job.result.name)


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else show_value(value)


def is_number(value: Any) -> bool:
    """Return whether a swept value is a number of reasonable size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
