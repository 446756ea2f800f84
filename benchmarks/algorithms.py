"""Measure the cost of each algorithm to reach a fixed error, relative to a plain recipe without it.

    python benchmarks/algorithms.py                          # both tasks; takes long, and resumes if interrupted
    python benchmarks/algorithms.py --task digits --only cutmix --seeds 3
    python benchmarks/algorithms.py --write                  # puts the tables into docs/algorithms.md

Each row is one change to a plain recipe, `digits_plain` or `stdlib_lm_plain`. Recipe and change are trained with the
same seeds for half of a budget B, for B, and for 2 B, each time with the whole schedule. Near B, the logarithm of the
error (wrong images, or bits per byte; mean of the seeds) falls about linearly with the logarithm of the budget. So, as
in a parallel-line assay, the ratio is the horizontal distance of two parallel lines: the difference of their mean log
errors over the three budgets, divided by the slope of the plain recipe's line. A ratio of 0.5 means that the change
reaches with half of B the error that the plain recipe reaches with B. The ratio of CPU time is that ratio times the
ratio of CPU seconds for the same budget, a median of runs, so keep the machine idle. Ratios above 4 or below 1/4 are
outside the range of the trained budgets, and shown as such.

Each seed makes a pair of runs, and pairs are compared as by `runner verdict`: brackets hold the 95 % interval of the
difference at the estimated slope, and a ratio is bold if the sign-flip test finds that it differs from 1, corrected by
Holm's method for all changes at that budget.

The tables include changes that make a recipe worse. Only the settings shown were tried, and both networks are small.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from _runs import ROOT, Result, Run, results, seeds_from

from runner.comparing.decision import LEVEL, Samples, count_needed, decide

RANGE = 4.0  # ratios above it, or below its inverse, cannot be told from budgets between half of B and 2 B
FACTORS = (0.5, 1.0, 2.0)
FIRST_SEED = 1000  # settings were chosen with other seeds

# Algorithms that have no row, and why.
NOT_MEASURED = {
    "compile": "compiling takes longer than these runs",
    "cuda_graph": "needs a GPU",
    "cudnn_benchmark": "needs a GPU",
    "ddp": "does nothing in a single process",
    "float8": "needs a GPU",
    "gyro_dropout": "replaces dropout, which neither recipe has",
    "low_precision_group_norm": "does nothing in 32 bits",
    "low_precision_layer_norm": "does nothing in 32 bits",
    "no_op_model": "trains nothing",
    "spike_guard": "does nothing in runs without spikes, such as these",
    "reduce_on_plateau": "replaces the schedule, which both recipes have",
}

DIGITS = """
~algorithms.batch_augment
+algorithms=augmix
+algorithms=batch_size_warmup
+algorithms=blurpool
+algorithms=channels_last
+algorithms=colout
+algorithms=cutmix
+algorithms=cutout
+algorithms=ema algorithms.ema.half_life=20ba
+algorithms=factorize algorithms.factorize.min_channels=32
+algorithms=ghost_batch_norm
+algorithms=gradient_clipping
+algorithms=info_batch
+algorithms=label_smoothing
+algorithms=lawa
+algorithms=layer_freezing
+algorithms=mixup
+algorithms=nan_guard
+algorithms=progressive_resizing
+algorithms=rand_augment
+algorithms=sam
+algorithms=selective_backprop
+algorithms=squeeze_excite algorithms.squeeze_excite.min_channels=32 algorithms.squeeze_excite.latent_channels=0.25
+algorithms=stochastic_depth algorithms.stochastic_depth.target_block=BasicBlock
+algorithms=swa
+algorithms=trivial_augment
+algorithms=weight_standardization
optimizer=adamw optimizer.lr=0.01 ~optimizer.momentum ~optimizer.nesterov
optimizer=muon optimizer.lr=0.2 optimizer.weight_decay=0 optimizer.rest=sgd optimizer.rest_lr=0.1 ~optimizer.nesterov
optimizer=schedule_free optimizer.lr=0.018 optimizer.weight_decay=0 ~optimizer.momentum ~optimizer.nesterov \
scheduler=none ~scheduler.t_warmup
"""
LANGUAGE = """
~algorithms.gradient_clipping
+algorithms=activation_checkpointing
+algorithms=alibi algorithms.alibi.max_sequence_length=128
+algorithms=batch_size_warmup
+algorithms=ema algorithms.ema.half_life=20ba
+algorithms=factorize algorithms.factorize.min_features=64 algorithms.factorize.latent_features=0.5
+algorithms=gated_linear_units
+algorithms=label_smoothing
+algorithms=lawa algorithms.lawa.update_interval=10ba
+algorithms=logit_softcap
+algorithms=nan_guard
+algorithms=ngram_embedding
+algorithms=qk_norm
+algorithms=rotary_embedding
+algorithms=sam
+algorithms=selective_backprop
+algorithms=seq_length_warmup algorithms.seq_length_warmup.min_seq_length=32 algorithms.seq_length_warmup.truncate=false
+algorithms=stochastic_depth algorithms.stochastic_depth.target_block=TransformerBlock
+algorithms=swa algorithms.swa.update_interval=10ba
+algorithms=value_embedding
model.module.activation=relu_squared
model.module.norm=rms_norm
model.module.tied_head=false
model.module.zero_init=true
optimizer=muon optimizer.lr=0.02 optimizer.rest_lr=6e-3 optimizer.rest_weight_decay=0.1 ~optimizer.betas
optimizer=schedule_free optimizer.betas=[0.0,0.95] scheduler=none ~scheduler.t_warmup
"""


@dataclass(frozen=True)
class Task:
    """A plain recipe, its budgets B, and changes to it as arguments of a command line.

    Attributes:
        unit: unit of budgets, as in a time string.
        label: format of a budget in the table.
        seeds: default number of seeds.
    """

    recipe: str
    unit: str
    label: str
    budgets: tuple[int, int]
    seeds: int
    changes: tuple[str, ...]

    def run(self, change: str, budget: float, seed: int) -> Run:
        duration = f"trainer.max_duration={budget:.0f}{self.unit}"
        return Run((f"experiment={self.recipe}", *change.split(), duration), seed)

    def trained(self) -> list[float]:
        """Return all budgets to train, for both values of B."""
        return sorted({budget * factor for budget in self.budgets for factor in FACTORS})


TASKS = {
    "digits": Task("digits_plain", "ep", "{} epochs", (8, 16), 11, tuple(DIGITS.strip().splitlines())),
    "language": Task(
        "stdlib_lm_plain", "tok", "{:,} bytes", (100_000, 200_000), 11, tuple(LANGUAGE.strip().splitlines())
    ),
}


@dataclass(frozen=True)
class Ratio:
    """A ratio of costs to reach the target, its 95 % interval, and whether it differs significantly from 1."""

    value: float
    low: float
    high: float
    is_decided: bool = False

    def times(self, factor: float) -> Ratio:
        """Return the ratio of a cost that is `factor` times this one; the noise of `factor` is unknown."""
        return Ratio(self.value * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        if self.value > RANGE:
            return f"> {RANGE:g}"
        if self.value < 1 / RANGE:
            return f"< {1 / RANGE:g}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


Errors = Sequence[Sequence[float]]
"""A list for each of `FACTORS`, with an error for each seed."""


def ratios(plain: Errors, changed: Sequence[Errors]) -> list[Ratio]:
    """Return the cost of each change, relative to the plain recipe's cost of the same error.

    Args:
        plain: errors of the plain recipe, with at least two seeds.
        changed: errors with each change.

    Raises:
        ValueError: the plain recipe is no better with a larger budget, so an error has no cost.
    """
    log_errors = [math.log(statistics.fmean(errors)) for errors in plain]
    slope = statistics.linear_regression([math.log(factor) for factor in FACTORS], log_errors).slope
    if slope >= 0:
        raise ValueError("the plain recipe is no better with a larger budget: train more seeds")
    seeds = [str(seed) for seed in range(len(plain[0]))]
    verdicts = decide([Samples(_by_seed(plain), _by_seed(errors), seeds) for errors in changed])
    return [
        Ratio(
            *(math.exp(difference / -slope) for difference in (verdict.difference, *(verdict.interval or ()))),
            is_decided=verdict.is_decided,
        )
        for verdict in verdicts
    ]


def _by_seed(errors: Errors) -> list[float]:
    """Return each seed's mean log error over the budgets."""
    return [statistics.fmean(map(math.log, of_seed)) for of_seed in zip(*errors, strict=True)]


def rows(
    task: Task, changes: Sequence[str], results_by_run: Mapping[Run, Result], seeds: Sequence[int]
) -> dict[str, list[Ratio]]:
    """Return the cells of each change: the ratios of budgets and of CPU time, for each B."""
    cells: dict[str, list[Ratio]] = {change: [] for change in changes}
    for budget in task.budgets:
        trained = {
            change: [[results_by_run[task.run(change, budget * factor, seed)] for seed in seeds] for factor in FACTORS]
            for change in ("", *changes)
        }
        errors = {
            change: [[result.error for result in results_] for results_ in by_factor]
            for change, by_factor in trained.items()
        }
        costs = ratios(errors[""], [errors[change] for change in changes])
        for change, cost in zip(changes, costs, strict=True):
            pairs = zip(chain(*trained[""]), chain(*trained[change]), strict=True)
            # The median, because a run sometimes shares its core with another process.
            time = statistics.median(after.seconds / before.seconds for before, after in pairs)
            cells[change] += [cost, cost.times(time)]
    return cells


def table(task: Task, changes: Sequence[str], results_by_run: Mapping[Run, Result], seeds: Sequence[int]) -> str:
    """Return the table in Markdown, with the cheapest change at the larger budget first."""
    labels = [task.label.format(budget) for budget in task.budgets]
    unit = "epochs" if task.unit == "ep" else "bytes"
    lines = [
        f"| change to `{task.recipe}`, n={len(seeds)} | "
        + " | ".join(f"{label}: {unit} | CPU time" for label in labels)
        + " |",
        "|---|" + "---|---|" * len(labels),
    ]
    for change, cells in sorted(rows(task, changes, results_by_run, seeds).items(), key=lambda row: row[1][2].value):
        texts = [f"**{cell}**" if cell.is_decided else f"{cell}" for cell in cells]
        lines.append(f"| `{change}` | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def write(name: str, text: str, path: Path) -> None:
    """Replace the table between its two marks in a file."""
    begin, end = f"<!-- {name}: benchmarks/algorithms.py -->", "<!-- end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", path.read_text(), count=1))


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, help="the task; default: both")
    parser.add_argument("--only", help="only changes that contain this word; default: all")
    parser.add_argument("--seeds", type=int, help="number of seeds, at least 2; default: 11")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, one thread each (default 2)")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "algorithms.jsonl", help="file of results")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/algorithms.md")
    arguments = parser.parse_args()
    for name, task in TASKS.items():
        if arguments.task not in (None, name):
            continue
        seeds = seeds_from(FIRST_SEED, arguments.seeds or task.seeds)
        changes = [change for change in task.changes if (arguments.only or "") in change]
        least = count_needed(math.inf, LEVEL / max(len(changes), 1))
        if least is not None and len(seeds) < least:
            print(f"{len(seeds)} seeds cannot tell any of {len(changes)} changes from the recipe; {least} can")
        # Seed by seed, so that a busy machine affects plain and changed runs alike.
        runs = [
            task.run(change, budget, seed) for seed in seeds for change in ("", *changes) for budget in task.trained()
        ]
        text = table(task, changes, results(runs, arguments.jobs, arguments.results), seeds)
        print(text, end="\n\n", flush=True)
        if arguments.write:
            write(name, text, ROOT / "docs" / "algorithms.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
