"""A decision in progress: the results of its jobs so far, and the jobs that come next.

Everything follows from the results, so a decision that was cut off continues where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from runner.cli.command import Command
from runner.comparing.campaign import Campaign
from runner.comparing.decision import LEVEL
from runner.failures.checks import check_session
from runner.failures.errors import WrongKey
from runner.records.listing import OUTPUTS
from runner.records.recording import fingerprint
from runner.records.result import Result
from runner.sweeps.decide.contenders import Contender
from runner.sweeps.decide.standings import Rules, Standing, compare_with_best, compare_with_first, find_leader

FEWEST = math.ceil(math.log2(2 / LEVEL))
"""The fewest seeds that can decide between two settings: even if all agree, each at most doubles the wealth."""
ENDED = ("FINISHED", "DIVERGED")


@dataclass
class Contest:
    """The settings to compare, and the rules.

    Attributes:
        contenders: the settings; the others are compared with the first, unless the best is sought.
        shared: the overrides that all of them share.
        best: whether the best setting is sought by elimination.
        margin: the largest difference that counts as none; None: settings are never found equal.
        most_seeds: the seeds after which the decision ends, decided or not.
        seconds: the time after which no further seed is trained.
        campaign: the campaign that it is part of; None: it has its own error budget.
        levels: the level of each comparison in the campaign, by its id.
    """

    contenders: Sequence[Contender]
    shared: Sequence[str] = ()
    best: bool = False
    margin: float | None = None
    most_seeds: int = 30
    seconds: float = math.inf
    campaign: Campaign | None = None
    levels: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, command: Command, contenders: Sequence[Contender], shared: Sequence[str]) -> Contest:
        """Return the contest that a command asks for.

        Raises:
            WrongKey: an option has a wrong value.
        """
        options = command.options
        margin = options["margin"]
        if margin is not None and not 0 < margin < math.inf:
            raise WrongKey("--margin", "must be a difference of the objective above 0, such as 0.01", repr(margin))
        if options["max_seeds"] < FEWEST:
            reason = f"must be at least {FEWEST}; fewer seeds can never decide"
            raise WrongKey("--max-seeds", reason, repr(options["max_seeds"]))
        try:
            seconds = check_session(options["budget"] or None)
        except ValueError:
            reason = "must be wall-clock time above 0, such as '2h' or '90s'"
            raise WrongKey("--budget", reason, repr(options["budget"])) from None
        name = options["campaign"]
        campaign = Campaign.named(name, Path(OUTPUTS)) if name else None
        return cls(contenders, shared, options["best"], margin, options["max_seeds"], seconds, campaign)

    def enter_campaign(self, identity: str) -> None:
        """Enter the comparisons of a sweep into the campaign, which fixes their levels."""
        if self.campaign is None:
            return
        first, *others = self.contenders
        pairs = {"best": " | ".join(each.name for each in self.contenders)} if self.best else {}
        pairs = pairs or {other.name: f"{first.name} | {other.name}" for other in others}
        self.levels = self.campaign.enter({fingerprint([identity, key]): name for key, name in pairs.items()})

    def check_comparable(self, results: Mapping[tuple[int, int], Result]) -> None:
        """Check that runs with equal seeds were evaluated in the same way.

        Raises:
            WrongKey: two settings differ in evaluation data, number of samples or metric.
        """
        for (index, seed), result in results.items():
            first = results.get((0, seed))
            name = result.objective_name
            if first is None or "FINISHED" not in (first.status, result.status) or not (name and first.objective_name):
                continue
            ways = {**first.evaluated_by(name), "metric": first.objective_name}
            others = {**result.evaluated_by(name), "metric": name}
            if different := [what for what, way in ways.items() if way != others[what]]:
                reason = f"its evaluation differs in its {different[0]} from that of {self.contenders[0].name}"
                raise WrongKey(
                    "SETTING", f"{reason}; such settings cannot be compared", repr(self.contenders[index].name)
                )

    def look(self, results: Mapping[tuple[int, int], Result]) -> Look:
        """Return what the results so far say, by setting and seed; results after a missing seed do not count yet."""
        objectives: list[list[float]] = []
        for index in range(len(self.contenders)):
            values: list[float] = []
            while (result := results.get((index, len(values)))) is not None and result.status in ENDED:
                value = result.objective if result.status == "FINISHED" else None
                values.append(math.nan if value is None else value)
            objectives.append(values)
        lower = next((result.lower_is_better for result in results.values() if result.status == "FINISHED"), True)
        return Look(self, objectives, lower)


@dataclass(frozen=True)
class Look:
    """A look at the objectives so far."""

    contest: Contest
    objectives: Sequence[Sequence[float]]
    lower: bool

    @property
    def rules(self) -> Rules:
        """The rules of the contest."""
        contest = self.contest
        return Rules(self.lower, contest.margin, contest.best, (*contest.levels.values(),) or None)

    @property
    def seeds(self) -> int:
        """The number of seeds of the setting with the most."""
        return max(map(len, self.objectives))

    def after(self, seeds: int) -> Look:
        """Return the look that was possible after a number of seeds."""
        return Look(self.contest, [values[:seeds] for values in self.objectives], self.lower)

    @cached_property
    def reference(self) -> int:
        """The index of the setting that the others are compared with."""
        return find_leader(self.objectives, self.lower) if self.contest.best else 0

    @cached_property
    def standings(self) -> dict[int, Standing]:
        """The standing of each setting but the reference, by index."""
        if not self.contest.best:
            return dict(enumerate(compare_with_first(self.objectives, self.rules), 1))
        standings = dict(enumerate(compare_with_best(self.objectives, self.rules)))
        del standings[self.reference]
        return standings

    @property
    def open(self) -> list[int]:
        """The indices of the settings to train with further seeds; empty once everything is decided."""
        standings = self.standings
        undecided = [index for index, standing in standings.items() if not standing.verdict]
        if not undecided:
            return []
        if not self.contest.best:
            return [0, *undecided]
        # Equal settings go on, because the leader may change.
        return sorted({self.reference, *(index for index, row in standings.items() if row.verdict != "worse")})

    def next_jobs(self, places: int) -> list[tuple[int, int]]:
        """Return the settings and seeds of the next jobs: as many seeds as are needed and as can run at once."""
        open = self.open
        if not open:
            return []
        expected = [row.more for index, row in self.standings.items() if index in open and row.more is not None]
        done = min(len(self.objectives[index]) for index in open)
        needed = max(FEWEST - done, min(expected, default=1), 1)
        end = min(done + max(1, min(places // len(open), needed)), self.contest.most_seeds)
        return [(index, seed) for seed in range(done, end) for index in open if seed >= len(self.objectives[index])]
