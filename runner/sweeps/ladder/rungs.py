"""The result of `sweep=ladder`: a power law of the best loss at each amount of compute, and a check of its prediction.

A rung is one amount of compute, with which all sizes are trained. The law is fitted to the best size of every rung but
the last. The last rung is trained too, but held out of the fit, and shows how well the law predicts.
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
    """All sizes at one amount of compute.

    Attributes:
        flop: the compute, in floating-point operations.
        settings: the sizes whose jobs all have an objective, best first.
        sizes: the number of all sizes.
    """

    flop: float
    settings: Sequence[Setting]
    sizes: int

    @property
    def best(self) -> Setting:
        """The best size."""
        return self.settings[0]

    @property
    def objectives(self) -> list[float]:
        """The objectives of the best size, one for each seed."""
        return self.best.objectives


@dataclass(frozen=True)
class Ladder:
    """The rungs of a sweep and the law of their losses.

    Attributes:
        objective: the name of the objective.
        rungs: the rungs in the order of their compute.
        extrapolation: the law and its prediction for the last rung; None without a law.
        problem: the reason why there is no law, or why it may mislead; empty if it is sound.
    """

    objective: str
    rungs: Sequence[Rung]
    extrapolation: Extrapolation | None
    problem: str = ""

    @property
    def is_inside(self) -> bool | None:
        """Whether the loss of the last rung is in the prediction interval; None without an interval."""
        if self.extrapolation is None or self.extrapolation.interval is None:
            return None
        low, high = self.extrapolation.interval
        return low <= (self.rungs[-1].best.mean or 0.0) <= high

    @property
    def sizes(self) -> list[str]:
        """The sizes that have losses, from the smallest to the largest."""
        keys = {size_of(setting): _size_key(setting) for rung in self.rungs for setting in rung.settings}
        return sorted(keys, key=lambda size: keys[size])

    def tabulate(self) -> Table:
        """Return columns and rows: for each rung the compute, the best size, its loss, and the loss by the law."""
        columns = ["flop", "best size", self.objective, "spread", "n", "law", "used"]
        rows = []
        for rung in self.rungs:
            law = None if self.extrapolation is None else self.extrapolation.law.at(rung.flop)
            used = "to fit" if rung is not self.rungs[-1] else "held out"
            if not rung.settings:
                rows.append([f"{rung.flop:g}", "none", None, None, 0, law, used])
                continue
            best = rung.best
            rows.append([f"{rung.flop:g}", size_of(best), best.mean, best.spread, len(rung.objectives), law, used])
        return columns, rows

    def lines(self) -> list[tuple[str, str]]:
        """Return the lines to print below the settings, as labels and texts."""
        lines = []
        if self.extrapolation is not None:
            law = self.extrapolation.law
            floor = f" + {law.floor:.3g}" if law.floor else ""
            text = f"{self.objective} = {law.scale:.4g} (C / {law.unit:g} flop)^{-law.exponent:.3g}{floor}"
            lines.append(("law", f"{text}{_between(', exponent', self.extrapolation.exponent, -1)}"))
            last = self.rungs[-1]
            spread = f" +- {last.best.spread:.2g}" if last.best.spread is not None else ""
            verdict = {None: "", True: ": as predicted", False: ": not as predicted"}[self.is_inside]
            interval = _between("", self.extrapolation.interval)
            predicted = f"{self.extrapolation.predicted:.4g}{interval} at {last.flop:g} flop"
            lines.append(("predicted", f"{predicted}; measured {last.best.mean:.4g}{spread}{verdict}"))
        if self.problem:
            lines.append(("note", self.problem))
        return lines

    def metrics(self) -> dict[str, float]:
        """Return metrics for the summary of the sweep; empty without a law."""
        if self.extrapolation is None:
            return {}
        return {
            "ladder/exponent": self.extrapolation.law.exponent,
            "ladder/floor": self.extrapolation.law.floor,
            "ladder/predicted": self.extrapolation.predicted,
            "ladder/measured": self.rungs[-1].best.mean or 0.0,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the ladder for programs."""
        extrapolation = self.extrapolation
        return {
            "rungs": [
                {
                    "flop": rung.flop,
                    "best": dict(_size(rung.best)) if rung.settings else None,
                    "losses": rung.objectives if rung.settings else [],
                    "is_held_out": rung is self.rungs[-1],
                }
                for rung in self.rungs
            ],
            "law": None
            if extrapolation is None
            else {
                "unit": extrapolation.law.unit,
                "scale": extrapolation.law.scale,
                "exponent": extrapolation.law.exponent,
                "exponent_interval": extrapolation.exponent,
                "floor": extrapolation.law.floor,
                "floor_interval": extrapolation.floor,
                "predicted": extrapolation.predicted,
                "predicted_interval": extrapolation.interval,
                "measured": self.rungs[-1].best.mean,
                "is_inside": self.is_inside,
            },
            "problem": self.problem or None,
        }


def make_ladder(settings: Sequence[Setting], lower_is_better: bool) -> Ladder:
    """Return the ladder of a sweep's settings, with a law if they allow one."""
    objective = objective_name([job for setting in settings for job in setting.jobs]) or "loss"
    by_flop: dict[float, list[Setting]] = {}
    for setting in settings:
        by_flop.setdefault(Budget.parse(setting.values[BUDGET]).flop or 0.0, []).append(setting)
    rungs = []
    for flop, sizes in sorted(by_flop.items()):
        complete = [setting for setting in sizes if setting.is_complete]
        rungs.append(Rung(flop, sorted(complete, key=lambda setting: setting.rank), len(sizes)))
    if problem := _why_no_law(rungs, objective, lower_is_better):
        return Ladder(objective, rungs, None, f"no law was fitted: {problem}")
    from runner.sweeps.ladder.power_law import extrapolate

    *fitted, last = (rung for rung in rungs if rung.settings)
    losses = [rung.objectives for rung in fitted]
    extrapolation = extrapolate([rung.flop for rung in fitted], losses, last.flop, len(last.objectives))
    return Ladder(objective, rungs, extrapolation, "; ".join(_doubts(rungs, extrapolation)))


def size_of(setting: Setting) -> str:
    """Return the size of a setting as text, such as `d_model=32`."""
    return describe(_size(setting))


def _size(setting: Setting) -> Mapping[str, Any]:
    return {key: value for key, value in setting.values.items() if key != BUDGET}


def _why_no_law(rungs: Sequence[Rung], objective: str, lower_is_better: bool) -> str:
    """Return the reason why no law can be fitted; empty if one can."""
    if not rungs[-1].settings:
        return f"at {rungs[-1].flop:g} flop, which is held out, no size has a loss for every seed"
    if sum(bool(rung.settings) for rung in rungs) < LEAST:
        missing = ", ".join(f"{rung.flop:g} flop" for rung in rungs if not rung.settings)
        return f"at {missing} no size has a finite loss for every seed; three rungs and one held out are needed"
    if not lower_is_better:
        return f"{objective} does not fall with compute; choose a loss, such as objective=eval/loss"
    if min(min(rung.objectives) for rung in rungs if rung.settings) <= 0:
        return f"{objective} is not above 0 everywhere"
    return ""


def _doubts(rungs: Sequence[Rung], extrapolation: Extrapolation) -> list[str]:
    """Return the reasons why a law may mislead."""
    doubts = []
    if extrapolation.interval is None:
        doubts.append("one seed cannot show the noise; add seed=0,1,2 for intervals")
    elif extrapolation.exponent is not None and extrapolation.exponent[0] <= 0:
        doubts.append("the loss may not fall with compute at all")
    if missing := sum(rung.sizes - len(rung.settings) for rung in rungs):
        doubts.append(f"{missing} settings without a loss for every seed are left out")
    last = rungs[-1]
    for edge, beyond, choose in (("largest", "larger", max), ("smallest", "smaller", min)):
        if last.best is choose(last.settings, key=_size_key) and last.sizes > 1:
            where = f"{size_of(last.best)}, the {edge}, is best at {last.flop:g} flop"
            doubts.append(f"{where}; a {beyond} one may be better")
    return doubts


def _size_key(setting: Setting) -> list[tuple[float, str]]:
    """Return the sort key of a size: its numbers, the sums of its lists of numbers, and other values as text."""
    parts = []
    for value in _size(setting).values():
        numbers = value if isinstance(value, list) else [value]
        is_number = all(isinstance(number, int | float) for number in numbers)
        parts.append((float(sum(numbers)), "") if is_number else (0.0, str(value)))
    return parts


def _between(name: str, interval: tuple[float, float] | None, sign: int = 1) -> str:
    """Return an interval as text, after a name, times a sign; empty without an interval."""
    if interval is None:
        return ""
    low, high = sorted(sign * bound for bound in interval)
    return f"{name} [{low:.3g}, {high:.3g}]"
