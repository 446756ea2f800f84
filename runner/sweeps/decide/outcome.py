"""The outcome of a decision, as lines, table, JSON and picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.comparing.decision import LEVEL
from runner.comparing.evidence import log_wealth
from runner.pictures.figure import COLORS, GRAY, add_legend, make_figure, style
from runner.sweeps.decide.contest import Contest, Look
from runner.sweeps.decide.standings import Standing
from runner.sweeps.settings import Table

NOT_DECIDED = "not decided"


def letter(index: int) -> str:
    """Return the letter of a setting: A for the first."""
    return chr(ord("A") + index) if index < 26 else f"S{index + 1}"


def introduce(contest: Contest) -> Iterator[str]:
    """Yield the lines that name the settings."""
    for index, contender in enumerate(contest.contenders):
        yield f"{letter(index)}  {contender.name}"


def describe(look: Look) -> str:
    """Return the evidence after the latest seed as one line, such as `3 seeds  B +0.06, p 0.31, about 3 more`."""
    parts = [
        f"{letter(index)} {_describe(standing, letter(look.reference), look.lower)}"
        for index, standing in look.standings.items()
    ]
    return f"{look.seeds} {'seed' if look.seeds == 1 else 'seeds'}  {'; '.join(parts)}"


def _describe(standing: Standing, reference: str, lower: bool) -> str:
    """Return the evidence about a setting as text, with the sign of the objective's difference."""
    diverged = int(np.sum(~np.isfinite(standing.improvements)))
    texts = [f"{_signed(standing.improvement, lower):+.3g}"] if diverged < len(standing.improvements) else []
    if diverged:
        texts.append(f"{diverged} diverged")
    if standing.interval is not None:
        low, high = sorted(_signed(bound, lower) for bound in standing.interval)
        texts.append(f"{low:+.3g} to {high:+.3g}")
    texts.append(f"p {standing.p:.2g}" if standing.p >= 1e-4 else "p < 0.0001")
    if standing.verdict == "equal":
        texts.append(f"equal to {reference} within the margin")
    elif standing.verdict:
        texts.append(f"{standing.verdict} than {reference}")
    elif standing.more is not None:
        texts.append(f"about {standing.more} more")
    return ", ".join(texts)


def _signed(improvement: float, lower: bool) -> float:
    return -improvement if lower else improvement


@dataclass(frozen=True)
class Outcome:
    """The outcome of a decision.

    Attributes:
        look: the last look at the results.
    """

    look: Look

    def settle(self) -> None:
        """Record the claims in the campaign, if there is one."""
        if self.contest.campaign is not None:
            verdicts = [self.answer()] if self.contest.best else [row.verdict for row in self.look.standings.values()]
            decided = not self.look.open
            claims = [verdict if decided or not self.contest.best else "" for verdict in verdicts]
            self.contest.campaign.claim(dict(zip(self.contest.levels, claims, strict=True)))

    @property
    def contest(self) -> Contest:
        """The settings and the rules."""
        return self.look.contest

    def answer(self) -> str:
        """Return the answer in one sentence."""
        look = self.look
        reference = letter(look.reference)
        standings = look.standings
        if self.contest.best:
            if all(standing.verdict == "worse" for standing in standings.values()):
                return f"{reference} is the best"
            left = {look.reference, *(index for index, row in standings.items() if row.verdict != "worse")}
            names = " and ".join(map(letter, sorted(left)))
            equal = all(standing.verdict for standing in standings.values())
            return f"{names} are equal within the margin" if equal else f"{NOT_DECIDED} between {names}"
        sentences = []
        for verdict, ending in (("better", "better than A"), ("worse", "worse than A"), ("equal", "equal to A")):
            names = [letter(index) for index, row in standings.items() if row.verdict == verdict]
            if names:
                sentences.append(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {ending}")
        if undecided := [letter(index) for index, row in standings.items() if not row.verdict]:
            sentences.append(f"{NOT_DECIDED}: {' and '.join(undecided)}")
        return "; ".join(sentences)

    def lines(self) -> list[tuple[str, str]]:
        """Return what the sweep prints at its end, as labels and texts."""
        look = self.look
        rows = [("decision", f"{self.answer()}, after {look.seeds} seeds")] if look.seeds else []
        reference = letter(look.reference)
        for index, standing in look.standings.items():
            rows.append(("", f"{letter(index)} minus {reference}: {_describe(standing, reference, look.lower)}"))
        rows += [("", line) for line in introduce(self.contest)]
        if look.open:
            rows.append(("", "the same command with more --max-seeds or --budget continues from here"))
        if self.contest.campaign is not None:
            levels = ", ".join(f"{level:.2g}" for level in self.contest.levels.values())
            rows.append(("campaign", f"{self.contest.campaign.path}: p must be at most {levels}"))
        return rows

    def tabulate(self) -> Table:
        """Return a table with a row for each setting and seed: its objective."""
        columns = ["setting", "overrides", "seed", "objective"]
        return columns, [
            [letter(index), contender.name, seed, None if math.isnan(value) else value]
            for index, contender in enumerate(self.contest.contenders)
            for seed, value in enumerate(self.look.objectives[index])
        ]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the sweep."""
        return {"decision/seeds": float(self.look.seeds), "decision/is_decided": float(not self.look.open)}

    def as_json(self) -> dict[str, Any]:
        """Return the decision for programs; differences are objectives minus that of the reference."""
        look = self.look
        contenders = self.contest.contenders
        comparisons = []
        for index, standing in look.standings.items():
            bounds = standing.interval
            comparisons.append(
                {
                    "name": contenders[index].name,
                    "with": contenders[look.reference].name,
                    "verdict": standing.verdict or NOT_DECIDED,
                    "n": len(standing.improvements),
                    "difference": _finite(_signed(standing.improvement, look.lower)),
                    "interval": bounds and sorted(_signed(bound, look.lower) for bound in bounds),
                    "p": standing.p,
                    "more_seeds": standing.more,
                }
            )
        return {
            "answer": self.answer(),
            "is_decided": not look.open,
            "seeds": look.seeds,
            "settings": [contender.name for contender in contenders],
            "objectives": [[*map(_finite, values)] for values in look.objectives],
            "comparisons": comparisons,
        }

    def draw(self) -> Any:
        """Return a figure of the evidence for a difference over seeds, on a log scale."""
        look = self.look
        with style():
            figure = make_figure(11.0, 3.4)
            axes = figure.add_subplot()
            axes.set(yscale="log", xlabel="seeds", ylabel="evidence of a difference")
            legend = {}
            for rank, (index, standing) in enumerate(look.standings.items()):
                wealth = np.exp(log_wealth(standing.improvements))
                seeds = range(1, len(wealth) + 1)
                name = f"{letter(index)} and {letter(look.reference)}"
                (legend[name],) = axes.plot(seeds, wealth, "o-", color=COLORS[rank % len(COLORS)], markersize=4)
            needed = [*self.contest.levels.values()] or [LEVEL / max(len(self.contest.contenders) - 1, 1)]
            for level in sorted({*needed}):
                legend["needed"] = axes.axhline(1 / level, color=GRAY, linestyle="--", linewidth=0.9)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_title("evidence after each seed: 1 is none, and each seed that agrees multiplies it")
            add_legend(axes, [*legend.values()], [*legend])
        return figure


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
