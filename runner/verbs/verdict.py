"""`runner verdict A B`: whether B is better than A, how certain that is, and how many seeds are missing.

A candidate is several runs with different seeds: folders of runs or sweeps, a glob, or conditions as in `runner runs`,
on the runs in outputs/ or in those folders: 'outputs/sweeps/2026-11-23/11-00-00 optimizer.lr=0.1'. Runs with the same
seed are pairs. The p-value comes from the exact test that flips the signs of their differences; without two pairs, runs
are permuted. With several candidates it is corrected by Holm's method. Different training budgets are refused
unless `--budget any` is typed. The exit code is 1 if a candidate is worse than the first, or alone has diverged runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.cli.command import Command
from runner.comparing.candidates import (
    Candidate,
    common_metric,
    find_candidate,
    find_differences,
    pair_up,
)
from runner.comparing.decision import LEVEL, Decision, decide
from runner.failures.errors import WrongKey
from runner.failures.exit_codes import DONE, FAILED
from runner.files.printable import printable
from runner.records.result import FOLD, to_json
from runner.terminal.answer import give
from runner.terminal.text import Column, draw_table, heading, in_columns

KEY = "RUNS"
FEW = 6  # fewest values for which an interval has its nominal coverage
SHOWN = 4  # keys that differ


@dataclass(frozen=True)
class Comparison:
    """A candidate in comparison with the first.

    `pairs` are the keys that the runs of each pair share, empty if they are not paired. The verdict is 'better',
    'worse' or 'not decided'.
    """

    candidate: Candidate
    decision: Decision
    pairs: Sequence[str]
    verdict: str


def run(command: Command) -> int:
    """Print whether candidates are better than the first one.

    Returns:
        The exit code: 1 if a candidate is worse than the first one, or has runs that diverged and the first one has
        none.
    """
    candidates = [find_candidate(name, KEY) for name in command.words]
    first, *others = candidates
    diverged = [] if "diverged" in first.missing else [one for one in others if "diverged" in one.missing]
    for candidate in candidates:
        if not candidate.runs and candidate not in diverged:
            reason = f"none of its runs has finished ({_describe_missing(candidate)})"
            raise WrongKey(KEY, reason, repr(candidate.name))
    if lost := [candidate.name for candidate in diverged if not candidate.runs]:
        reason = f"worse: all runs of {printable(' and '.join(lost))} diverged"
        print(reason)
        give(reason=reason)
        return FAILED
    metric, lower = common_metric(candidates, command.options["metric"], "--metric")
    found = compare(candidates, metric, lower, command.options["budget"] == "any")
    give(result=_as_json(first, found, metric, lower))
    print("\n".join(_lines(first, found, metric, lower)))
    if not diverged and not any(comparison.verdict == "worse" for comparison in found):
        return DONE
    give(reason=_answer(_letters(len(found) + 1), found))
    return FAILED


def compare(candidates: Sequence[Candidate], metric: str, lower: bool, allows_budget: bool) -> list[Comparison]:
    """Return how each candidate but the first compares with the first."""
    first, *others = candidates
    samples = [pair_up(first, one, metric, KEY, allows_budget) for one in others]
    decisions = decide(samples)
    return [
        Comparison(one, decision, found.pairs, _judge(first, one, decision, lower))
        for one, decision, found in zip(others, decisions, samples, strict=True)
    ]


def _judge(first: Candidate, other: Candidate, decision: Decision, lower: bool) -> str:
    """Return the verdict; a candidate that diverges with some seeds is never better."""
    if not decision.is_decided:
        return "not decided"
    is_better = (decision.difference < 0) == lower
    winner = other if is_better else first
    if "diverged" in winner.missing:
        return "not decided"
    return "better" if is_better else "worse"


def _as_json(first: Candidate, found: Sequence[Comparison], metric: str, lower: bool) -> dict[str, Any]:
    return {
        "metric": metric,
        "lower_is_better": lower,
        "candidates": [
            {
                "name": one.name,
                "runs": [str(run.folder) for run in one.runs],
                "values": [run.result.metrics[metric] for run in one.runs],
                "left_out": one.missing,
            }
            for one in (first, *(one.candidate for one in found))
        ],
        "comparisons": [
            {
                "name": one.candidate.name,
                "with": first.name,
                "verdict": one.verdict,
                "paired": one.decision.is_paired,
                "pairs": [*one.pairs],
                "n": list(one.decision.n),
                "means": list(one.decision.means),
                "difference": one.decision.difference,
                "interval": one.decision.interval,
                "p": one.decision.p,
                "smallest_p": one.decision.smallest_p,
                "effect": None if math.isnan(one.decision.effect) else to_json(one.decision.effect),
                "more_seeds": one.decision.more,
            }
            for one in found
        ],
    }


def _lines(first: Candidate, found: Sequence[Comparison], metric: str, lower: bool) -> Iterator[str]:
    """Yield the lines for people: the answer, the candidates, the numbers, and their basis."""
    letters = _letters(len(found) + 1)
    yield heading(_answer(letters, found))
    yield ""
    candidates = [first, *(one.candidate for one in found)]
    yield from in_columns([(letter, one.name) for letter, one in zip(letters, candidates, strict=True)], indent=0)
    yield ""
    yield from _table(letters, candidates, found, metric)
    yield ""
    rows = [("metric", f"{metric}, {'lower' if lower else 'higher'} is better")]
    for letter, one in zip(letters[1:], found, strict=True):
        rows += [(f"{name} {letter}" if name and len(found) > 1 else name, text) for name, text in _explain(one)]
    for letter, one in zip(letters, candidates, strict=True):
        if one.left_out:
            rows.append(("left out", f"{letter}: {_describe_missing(one)}"))
    if len(found) == 1:
        rows.append(("differs", _describe_differences(first, candidates[1])))
    yield from in_columns(rows, indent=0)


def _answer(letters: Sequence[str], found: Sequence[Comparison]) -> str:
    if len(found) == 1:
        verdict = found[0].verdict
        return "Not decided: the difference may be chance" if verdict == "not decided" else f"B is {verdict} than A"
    parts = []
    for verdict in ("better", "worse", "not decided"):
        names = [letter for letter, one in zip(letters[1:], found, strict=True) if one.verdict == verdict]
        if names:
            verb = "is" if len(names) == 1 else "are"
            parts.append(f"{', '.join(names)} {verb} {verdict}{' than A' if verdict != 'not decided' else ''}")
    return "; ".join(parts)


def _table(
    letters: Sequence[str], candidates: Sequence[Candidate], found: Sequence[Comparison], metric: str
) -> list[str]:
    values = [[run.result.metrics[metric] for run in one.runs] for one in candidates]
    decisions: list[Decision | None] = [None, *(one.decision for one in found)]
    intervals = [one.interval if one is not None else None for one in decisions]
    return draw_table(
        [
            Column([""], [*letters]),
            Column(["runs"], [str(len(one)) for one in values], True),
            Column(["mean"], [_show(statistics.fmean(one)) for one in values], True),
            Column(["spread"], [f"{statistics.stdev(one):.2g}" if len(one) > 1 else "-" for one in values], True),
            Column(["minus A"], [f"{one.difference:+.3g}" if one is not None else "" for one in decisions], True),
            Column(["95 % interval"], [f"{one[0]:+.3g} to {one[1]:+.3g}" if one else "" for one in intervals], True),
            Column(["p"], [_show_p(one.p) if one is not None else "" for one in decisions], True),
            Column(["verdict"], ["", *(one.verdict for one in found)]),
        ]
    )


def _explain(one: Comparison) -> Iterator[tuple[str, str]]:
    """Yield sentences that explain the basis of a comparison."""
    decision = one.decision
    count = min(decision.n)
    if decision.is_paired:
        seeds = ", ".join(one.pairs[:8]) + (", ..." if len(one.pairs) > 8 else "")
        folds = "; the folds of a seed count as their mean" if FOLD in one.candidate.varying else ""
        yield "test", f"paired: {_plural(count, 'pair')} of runs with equal seeds ({seeds}), signs flipped{folds}"
    else:
        yield "test", f"not paired, as seeds differ: {decision.n[0]} and {_plural(decision.n[1], 'run')}, permuted"
    if decision.smallest_p > LEVEL:
        smallest = _show_p(decision.smallest_p)
        yield "", f"so few cannot decide: the smallest p that they can have is {smallest}, not {LEVEL}"
    if decision.interval is not None and count < FEW:
        yield "", f"the interval is too narrow with fewer than {FEW}"
    if not decision.is_decided:
        if decision.more is not None:
            text = f"{decision.more} more of each would show a difference as large as this one with a chance of 80 %"
        elif count < 2:
            text = "8 of each are enough for differences that are clearly larger than the spread"
        else:
            text = "more than 1,000 would be needed for a difference as small as this one"
        yield "seeds", text
    elif one.verdict == "not decided":
        yield "", "the one with the better mean has runs that diverged"


def _describe_missing(one: Candidate) -> str:
    return ", ".join(f"{count} {status}" for status, count in one.missing.items()) or "no run"


def _describe_differences(a: Candidate, b: Candidate) -> str:
    rows = find_differences(a, b)
    shown = [f"{key} {first} -> {second}" for key, first, second in rows[:SHOWN]]
    more = [f"{len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    return printable("; ".join([*shown, *more]) or "no key of the config")


def _letters(count: int) -> list[str]:
    return [chr(ord("A") + place) if count <= 26 else ("A" if place == 0 else f"B{place}") for place in range(count)]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _show(value: float) -> str:
    """Return a mean as text."""
    return f"{value:.4g}"


def _show_p(p: float) -> str:
    """Return a p-value as text; a sampled one is rounded to its precision."""
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"
