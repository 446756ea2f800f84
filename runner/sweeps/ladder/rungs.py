"""The result of `sweep=ladder`: a power law of the best loss at each amount of compute, and a check of its prediction.

All sizes are trained with each amount of compute, a rung. The law is fitted to the best size of every rung but the
last, which is held out: it is trained like the others, and shows how well the law predicts the next size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.sweeps.ladder.jobs import BUDGET, LEAST
from runner.sweeps.names import describe
from runner.sweeps.settings import Setting, Table, objective_name
from runner.training.budget import Budget

if TYPE_CHECKING:
    from runner.sweeps.ladder.power_law import Extrapolation


@dataclass(frozen=True)
class Rung:
    """All sizes at one amount of compute; `settings` are those whose jobs all have a loss, best first."""

    flop: float
    settings: Sequence[Setting]
    sizes: int

    @property
    def best(self) -> Setting:
        """The best size."""
        return self.settings[0]

    @property
    def losses(self) -> list[float]:
        """The losses of the best size, one for each seed."""
        return self.best.objectives


@dataclass(frozen=True)
class Ladder:
    """The rungs of a sweep and the law of their losses.

    The rungs are in the order of their compute, and the law predicts the last one. `problem` says why there is no law,
    or why it may mislead.
    """

    objective: str
    rungs: Sequence[Rung]
    found: Extrapolation | None
    problem: str = ""

    @property
    def is_inside(self) -> bool | None:
        """Whether the loss of the last rung is in the prediction interval; None if there is no interval."""
        if self.found is None or self.found.interval is None:
            return None
        low, high = self.found.interval
        return low <= (self.rungs[-1].best.mean or 0.0) <= high

    @property
    def sizes(self) -> list[str]:
        """The sizes that have losses, from the smallest to the largest."""
        found = {size_of(one): _rank(one) for rung in self.rungs for one in rung.settings}
        return sorted(found, key=lambda size: found[size])

    def tabulate(self) -> Table:
        """Return columns and rows: for each rung the compute, the best size, its loss, and the loss of the law."""
        columns = ["flop", "best size", self.objective, "spread", "n", "law", "used"]
        rows = []
        for rung in self.rungs:
            law = None if self.found is None else self.found.law.at(rung.flop)
            used = "to fit" if rung is not self.rungs[-1] else "held out"
            if not rung.settings:
                rows.append([f"{rung.flop:g}", "none", None, None, 0, law, used])
                continue
            best = rung.best
            rows.append([f"{rung.flop:g}", size_of(best), best.mean, best.spread, len(rung.losses), law, used])
        return columns, rows

    def lines(self) -> list[tuple[str, str]]:
        """Return what to print below the settings, as labels and texts."""
        lines = []
        if self.found is not None:
            law = self.found.law
            floor = f" + {law.floor:.3g}" if law.floor else ""
            text = f"{self.objective} = {law.scale:.4g} (C / {law.unit:g} flop)^{-law.exponent:.3g}{floor}"
            lines.append(("law", f"{text}{_between(', exponent', self.found.exponent, -1)}"))
            last = self.rungs[-1]
            spread = f" +- {last.best.spread:.2g}" if last.best.spread is not None else ""
            verdict = {None: "", True: ": as predicted", False: ": not as predicted"}[self.is_inside]
            predicted = f"{self.found.predicted:.4g}{_between('', self.found.interval)} at {last.flop:g} flop"
            lines.append(("predicted", f"{predicted}; measured {last.best.mean:.4g}{spread}{verdict}"))
        if self.problem:
            lines.append(("note", self.problem))
        return lines

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the summary run; none without a law."""
        if self.found is None:
            return {}
        return {
            "ladder/exponent": self.found.law.exponent,
            "ladder/floor": self.found.law.floor,
            "ladder/predicted": self.found.predicted,
            "ladder/measured": self.rungs[-1].best.mean or 0.0,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the ladder for programs."""
        found = self.found
        return {
            "rungs": [
                {
                    "flop": rung.flop,
                    "best": dict(_size(rung.best)) if rung.settings else None,
                    "losses": rung.losses if rung.settings else [],
                    "is_held_out": rung is self.rungs[-1],
                }
                for rung in self.rungs
            ],
            "law": None
            if found is None
            else {
                "unit": found.law.unit,
                "scale": found.law.scale,
                "exponent": found.law.exponent,
                "exponent_interval": found.exponent,
                "floor": found.law.floor,
                "floor_interval": found.floor,
                "predicted": found.predicted,
                "predicted_interval": found.interval,
                "measured": self.rungs[-1].best.mean,
                "is_inside": self.is_inside,
            },
            "problem": self.problem or None,
        }


def climb(settings: Sequence[Setting], lower_is_better: bool) -> Ladder:
    """Return the ladder that the settings of a sweep make."""
    objective = objective_name([job for setting in settings for job in setting.jobs]) or "loss"
    by_flop: dict[float, list[Setting]] = {}
    for setting in settings:
        by_flop.setdefault(Budget.parse(setting.values[BUDGET]).flop or 0.0, []).append(setting)
    rungs = []
    for flop, same in sorted(by_flop.items()):
        complete = [one for one in same if one.is_complete]
        rungs.append(Rung(flop, sorted(complete, key=lambda one: one.rank), len(same)))
    if problem := _why_no_law(rungs, objective, lower_is_better):
        return Ladder(objective, rungs, None, f"no law was fitted: {problem}")
    from runner.sweeps.ladder.power_law import extrapolate

    *fitted, last = (rung for rung in rungs if rung.settings)
    found = extrapolate([one.flop for one in fitted], [one.losses for one in fitted], last.flop, len(last.losses))
    return Ladder(objective, rungs, found, "; ".join(_doubts(rungs, found)))


def size_of(setting: Setting) -> str:
    """Return the size of a setting as text, such as `d_model=32`."""
    return describe(_size(setting))


def _size(setting: Setting) -> Mapping[str, Any]:
    return {key: value for key, value in setting.values.items() if key != BUDGET}


def _why_no_law(rungs: Sequence[Rung], objective: str, lower_is_better: bool) -> str:
    if not rungs[-1].settings:
        return f"at {rungs[-1].flop:g} flop, which is held out, no size has a loss for every seed"
    if sum(bool(rung.settings) for rung in rungs) < LEAST:
        missing = ", ".join(f"{rung.flop:g} flop" for rung in rungs if not rung.settings)
        return f"at {missing} no size has a finite loss for every seed; three rungs and one held out are needed"
    if not lower_is_better:
        return f"{objective} does not fall with compute; choose a loss, such as objective=eval/loss"
    if min(min(rung.losses) for rung in rungs if rung.settings) <= 0:
        return f"{objective} is not above 0 everywhere"
    return ""


def _doubts(rungs: Sequence[Rung], found: Extrapolation) -> list[str]:
    """Return why a law may mislead, a clause each."""
    doubts = []
    if found.interval is None:
        doubts.append("one seed cannot show the noise; add seed=0,1,2 for intervals")
    elif found.exponent is not None and found.exponent[0] <= 0:
        doubts.append("the loss may not fall with compute at all")
    if missing := sum(rung.sizes - len(rung.settings) for rung in rungs):
        doubts.append(f"{missing} settings without a loss for every seed are left out")
    last = rungs[-1]
    for edge, beyond, choose in (("largest", "larger", max), ("smallest", "smaller", min)):
        if last.best is choose(last.settings, key=_rank) and last.sizes > 1:
            where = f"{size_of(last.best)}, the {edge}, is best at {last.flop:g} flop"
            doubts.append(f"{where}; a {beyond} one may be better")
    return doubts


def _rank(setting: Setting) -> list[tuple[float, str]]:
    """Return the sort key of sizes: numbers, and sums of lists of numbers; other values as text."""
    ranks = []
    for value in _size(setting).values():
        numbers = value if isinstance(value, list) else [value]
        is_number = all(isinstance(one, int | float) for one in numbers)
        ranks.append((float(sum(numbers)), "") if is_number else (0.0, str(value)))
    return ranks


def _between(what: str, interval: tuple[float, float] | None, sign: int = 1) -> str:
    if interval is None:
        return ""
    low, high = sorted(sign * one for one in interval)
    return f"{what} [{low:.3g}, {high:.3g}]"
