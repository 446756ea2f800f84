"""`runner verdict A B`: tells whether B is better than A, how certain that is, and how many more seeds are needed.

A candidate is several runs with different seeds: folders of runs or sweeps, a glob, or conditions as in `runner runs`,
on the runs in outputs/ or in those folders: 'outputs/sweeps/2026-11-23/11-00-00 optimizer.lr=0.1'. Runs with the same
seed are pairs. The p-value comes from the exact test that flips the signs of their differences; without two pairs, runs
are permuted. Holm's method corrects it for several candidates. Different training budgets are refused without
`--budget any`. The exit code is 1 if a candidate is worse than the first, or has diverged runs and the first has none.

RUNS may also be results from elsewhere: 'results.csv setting=a', or 'mlflow:NAME' with a filter in MLflow's language
after it. If they are the only word, all their settings are compared with the first one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runner.cli.command import Command
from runner.comparing.candidates import (
    Candidate,
    common_metric,
    describe_foreign,
    find_candidate,
    find_differences,
    make_candidate,
    pair_up,
    split,
)
from runner.comparing.decision import LEVEL, Decision, decide
from runner.comparing.foreign_results import Columns, read_table
from runner.failures.errors import WrongKey
from runner.failures.exit_codes import DONE, FAILED
from runner.files.printable import printable
from runner.records.result import FOLD, to_json
from runner.terminal.answer import set_fields
from runner.terminal.text import Column, draw_table, heading, in_columns

KEY = "RUNS"
FEW = 6  # fewest values for which an interval has its nominal coverage
SHOWN = 4  # keys that differ


@dataclass(frozen=True)
class Comparison:
    """A candidate compared with the first.

    `pairs` holds the keys that the runs of each pair share; it is empty for unpaired runs. The verdict is 'better',
    'worse' or 'not decided'.
    """

    candidate: Candidate
    decision: Decision
    pairs: Sequence[str]
    verdict: str


@dataclass(frozen=True)
class Verdict:
    """Candidates compared with the first; as text, the output of `runner verdict`.

    `notes` has what was guessed about results from elsewhere, and a warning about facts that they lack.
    """

    metric: str
    lower_is_better: bool
    first: Candidate
    comparisons: Sequence[Comparison]
    notes: Sequence[tuple[str, str]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything in plain containers, as `runner verdict --json` has it under `result`."""
        notes = {"notes": [f"{name}: {text}" for name, text in self.notes]} if self.notes else {}
        return _as_json(self.first, self.comparisons, self.metric, self.lower_is_better) | notes

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def run(command: Command) -> int:
    """Print whether candidates are better than the first one.

    Returns:
        The exit code: 1 if a candidate is worse than the first one, or only the candidate has diverged runs.
    """
    options = command.options
    candidates = _find(command.words, Columns(options["metric"], options["seed_column"], options["setting_column"]))
    first, *rivals = candidates
    diverged = [] if "diverged" in first.missing else [rival for rival in rivals if "diverged" in rival.missing]
    _check_finished([candidate for candidate in candidates if candidate not in diverged])
    if lost := [candidate.name for candidate in diverged if not candidate.runs]:
        reason = f"worse: all runs of {printable(' and '.join(lost))} diverged"
        print(reason)
        set_fields(reason=reason)
        return FAILED
    judged = _judge_all(candidates, options["metric"], options["better"], options["budget"])
    set_fields(result=judged.to_dict())
    print(judged)
    is_worse = any(comparison.verdict == "worse" for comparison in judged.comparisons)
    if not diverged and not is_worse:
        return DONE
    names = printable(" and ".join(candidate.name for candidate in diverged))
    answer = _answer(_letters(len(candidates)), judged.comparisons)
    set_fields(reason=answer if is_worse else f"worse: some runs of {names} diverged")
    return FAILED


def verdict(
    *candidates: Any,
    metric: str = "",
    better: Literal["auto", "lower", "higher"] = "auto",
    budget: Literal["same", "any"] = "same",
    seed_column: str = "",
    setting_column: str | Sequence[str] = (),
) -> Verdict:
    """Return whether each candidate is better than the first, as `runner verdict` does.

    Args:
        candidates: for each, a text as on the command line, or its results: a list of mappings, or a pandas DataFrame
            with a row for each run. The settings in a single table are compared with the setting in its first row.
        metric: the metric or column to compare by; by default the objective, or the only measured column.
        better: which values of the metric are better; `auto` follows the runs, or else the metric's name.
        budget: `any` also compares runs that were trained for different lengths.
        seed_column: the column with the seed; by default, it is recognized by its name.
        setting_column: the columns that define a setting; by default, they are recognized.

    Raises:
        ValueError: the results are incomplete, or cannot be compared.
    """
    settings = [setting_column] if isinstance(setting_column, str) and setting_column else [*setting_column]
    chosen = _find(candidates, Columns(metric, seed_column, settings))
    _check_finished(chosen)
    return _judge_all(chosen, metric, better, budget)


def _find(sources: Sequence[Any], columns: Columns) -> list[Candidate]:
    """Return the candidates in texts or tables; for a single table, each of its settings."""
    candidates = [
        find_candidate(source, KEY, columns)
        if isinstance(source, str)
        else make_candidate(f"table {number}", read_table(source, columns, KEY))
        for number, source in enumerate(sources, 1)
    ]
    if len(candidates) == 1:
        candidates = split(candidates[0])
    if len(candidates) < 2:
        name = candidates[0].name if candidates else ""
        raise WrongKey(KEY, "is a single setting; name another to compare it with, or --setting-column", repr(name))
    return candidates


def _check_finished(candidates: Sequence[Candidate]) -> None:
    for candidate in candidates:
        if not candidate.runs:
            reason = f"none of its runs has finished ({_describe_missing(candidate)})"
            raise WrongKey(KEY, reason, repr(candidate.name))


def _judge_all(candidates: Sequence[Candidate], metric: str, better: str, budget: str) -> Verdict:
    name, lower = common_metric(candidates, metric, "--metric", better)
    comparisons = compare(candidates, name, lower, budget == "any")
    return Verdict(name, lower, candidates[0], comparisons, describe_foreign(candidates))


def compare(candidates: Sequence[Candidate], metric: str, lower: bool, allows_budget: bool) -> list[Comparison]:
    """Compare each further candidate with the first."""
    first, *rivals = candidates
    samples = [pair_up(first, rival, metric, KEY, allows_budget) for rival in rivals]
    decisions = decide(samples)
    return [
        Comparison(rival, decision, sample.pairs, _judge(first, rival, decision, lower))
        for rival, decision, sample in zip(rivals, decisions, samples, strict=True)
    ]


def _judge(first: Candidate, other: Candidate, decision: Decision, lower: bool) -> str:
    """Return the verdict; a candidate with diverged runs is never better."""
    if not decision.is_decided:
        return "not decided"
    is_better = (decision.difference < 0) == lower
    winner = other if is_better else first
    if "diverged" in winner.missing:
        return "not decided"
    return "better" if is_better else "worse"


def _as_json(first: Candidate, comparisons: Sequence[Comparison], metric: str, lower: bool) -> dict[str, Any]:
    return {
        "metric": metric,
        "lower_is_better": lower,
        "candidates": [
            {
                "name": candidate.name,
                "runs": [str(run.folder) for run in candidate.runs],
                "values": [run.result.metrics[metric] for run in candidate.runs],
                "left_out": candidate.missing,
            }
            for candidate in (first, *(comparison.candidate for comparison in comparisons))
        ],
        "comparisons": [
            {
                "name": comparison.candidate.name,
                "with": first.name,
                "verdict": comparison.verdict,
                "paired": comparison.decision.is_paired,
                "pairs": [*comparison.pairs],
                "n": list(comparison.decision.n),
                "means": list(comparison.decision.means),
                "difference": comparison.decision.difference,
                "interval": comparison.decision.interval,
                "p": comparison.decision.p,
                "smallest_p": comparison.decision.smallest_p,
                "anytime": None if comparison.decision.anytime is None else comparison.decision.anytime._asdict(),
                "effect": None if math.isnan(comparison.decision.effect) else to_json(comparison.decision.effect),
                "more_seeds": comparison.decision.more,
            }
            for comparison in comparisons
        ],
    }


def _lines(judged: Verdict) -> Iterator[str]:
    """Yield the lines to print: the answer, the candidates, the numbers, and their basis."""
    first, comparisons, metric = judged.first, judged.comparisons, judged.metric
    letters = _letters(len(comparisons) + 1)
    yield heading(_answer(letters, comparisons))
    yield ""
    candidates = [first, *(comparison.candidate for comparison in comparisons)]
    yield from in_columns([(letter, row.name) for letter, row in zip(letters, candidates, strict=True)], indent=0)
    yield ""
    yield from _table(letters, candidates, comparisons, metric)
    yield ""
    rows = [("metric", f"{metric}, {'lower' if judged.lower_is_better else 'higher'} is better"), *judged.notes]
    for letter, comparison in zip(letters[1:], comparisons, strict=True):
        suffix = f" {letter}" if len(comparisons) > 1 else ""
        rows += [(f"{name}{suffix}" if name else name, text) for name, text in _explain(comparison)]
    rows.append(("", _anytime_advice(comparisons)))
    for letter, candidate in zip(letters, candidates, strict=True):
        if candidate.left_out:
            rows.append(("left out", f"{letter}: {_describe_missing(candidate)}"))
    if len(comparisons) == 1:
        rows.append(("differs", _describe_differences(first, candidates[1])))
    yield from in_columns(rows, indent=0)


def _answer(letters: Sequence[str], comparisons: Sequence[Comparison]) -> str:
    if len(comparisons) == 1:
        verdict = comparisons[0].verdict
        return "Not decided: the difference may be chance" if verdict == "not decided" else f"B is {verdict} than A"
    parts = []
    for verdict in ("better", "worse", "not decided"):
        names = [letter for letter, row in zip(letters[1:], comparisons, strict=True) if row.verdict == verdict]
        if names:
            verb = "is" if len(names) == 1 else "are"
            parts.append(f"{', '.join(names)} {verb} {verdict}{' than A' if verdict != 'not decided' else ''}")
    return "; ".join(parts)


def _table(
    letters: Sequence[str], candidates: Sequence[Candidate], comparisons: Sequence[Comparison], metric: str
) -> list[str]:
    values = [[run.result.metrics[metric] for run in candidate.runs] for candidate in candidates]
    decisions: list[Decision | None] = [None, *(comparison.decision for comparison in comparisons)]
    intervals = [decision.interval if decision is not None else None for decision in decisions]
    return draw_table(
        [
            Column([""], [*letters]),
            Column(["runs"], [str(len(numbers)) for numbers in values], True),
            Column(["mean"], [f"{statistics.fmean(numbers):.4g}" for numbers in values], True),
            Column(["spread"], [f"{statistics.stdev(group):.2g}" if len(group) > 1 else "-" for group in values], True),
            Column(["minus A"], [f"{test.difference:+.3g}" if test is not None else "" for test in decisions], True),
            Column(["95 % interval"], [f"{x[0]:+.3g} to {x[1]:+.3g}" if x else "" for x in intervals], True),
            Column(["p"], [_show_p(test.p) if test is not None else "" for test in decisions], True),
            Column(["verdict"], ["", *(comparison.verdict for comparison in comparisons)]),
        ]
    )


def _explain(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield sentences that explain the basis of a comparison."""
    decision = comparison.decision
    count = min(decision.n)
    if decision.is_paired:
        seeds = ", ".join(comparison.pairs[:8]) + (", ..." if len(comparison.pairs) > 8 else "")
        folds = "; the folds of a seed count as their mean" if FOLD in comparison.candidate.varying else ""
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
    elif comparison.verdict == "not decided":
        yield "", "the one with the better mean has runs that diverged"
    if decision.anytime is not None:
        bounds = decision.anytime.interval
        interval = f"interval {bounds[0]:+.3g} to {bounds[1]:+.3g}" if bounds else "too few pairs for an interval"
        yield "anytime", f"p {_show_p(decision.anytime.p)}, {interval}"


def _anytime_advice(comparisons: Sequence[Comparison]) -> str:
    """Return when to use which p-value, or how to get one that stays valid while seeds are added."""
    if all(comparison.decision.anytime is None for comparison in comparisons):
        return "train both with equal seeds to get pairs, and with them a p that is valid after each further seed"
    return "use it to check after each seed, p above if their number was fixed"


def _describe_missing(candidate: Candidate) -> str:
    return ", ".join(f"{count} {status}" for status, count in candidate.missing.items()) or "no run"


def _describe_differences(a: Candidate, b: Candidate) -> str:
    rows = find_differences(a, b)
    shown = [f"{key} {first} -> {second}" for key, first, second in rows[:SHOWN]]
    more = [f"{len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    return printable("; ".join([*shown, *more]) or "no key of the config")


def _letters(count: int) -> list[str]:
    return [chr(ord("A") + number) if count <= 26 else f"B{number}" if number else "A" for number in range(count)]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _show_p(p: float) -> str:
    """Return a p-value as text; a sampled one is rounded to its precision."""
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"
