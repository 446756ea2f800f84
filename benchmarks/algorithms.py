"""What each algorithm alone is worth: its cost to a fixed target as a ratio to the plain recipe's, losers included.

    python benchmarks/algorithms.py                          # both tasks; long, and goes on where it was stopped
    python benchmarks/algorithms.py --task digits --only cutmix --seeds 3
    python benchmarks/algorithms.py --write                  # puts the tables into docs/algorithms.md

A row is one change to a plain recipe, `digits_plain` or `stdlib_lm_plain`. Recipe and change are trained with the same
seeds for half of a budget B, for B, and for 2 B, each time with the whole schedule. Near B the logarithm of the error
(wrong images, or bits per byte; mean of the seeds) falls about linearly with the logarithm of the budget. So, as in a
parallel-line assay, the ratio is the horizontal distance of two parallel lines: the difference of their mean log errors
over the three budgets, divided by the slope of the plain recipe's line. 0.5 means: the error that the plain recipe
reaches with B is reached with half of it. The ratio of CPU time is that ratio times the one of CPU seconds for the same
budget: the median of runs, so leave the machine alone meanwhile. Behind ± is the standard error, by the jackknife over
seeds; with few seeds it is rough itself. Ratios beyond 4 either way are outside of what was trained, and shown as such.

What a ratio is not: settings other than those shown were not tried, and both networks are small.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _runs import ROOT, Result, Run, results, seeds_from

RANGE = 4.0  # ratios that half to twice a budget can show, either way
FACTORS = (0.5, 1.0, 2.0)
FIRST_SEED = 1000  # settings were chosen with others

# Algorithms that have no row, and why.
NOT_MEASURED = {
    "compile": "compiling takes longer than these runs",
    "cudnn_benchmark": "needs a GPU",
    "ddp": "does nothing in a single process",
    "gyro_dropout": "takes the place of dropout, which neither recipe has",
    "low_precision_group_norm": "does nothing in 32 bits",
    "low_precision_layer_norm": "does nothing in 32 bits",
    "no_op_model": "trains nothing",
    "reduce_on_plateau": "takes the place of the schedule, which both recipes have",
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
    """A plain recipe, the budgets B, and the changes to it, as arguments of a command line.

    Attributes:
        unit: of budgets, as in a time string.
        label: what a budget is called in the table, of a number.
        seeds: how many, unless the command line says otherwise.
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
        """Return all budgets that are trained, those of both B."""
        return sorted({budget * factor for budget in self.budgets for factor in FACTORS})


TASKS = {
    "digits": Task("digits_plain", "ep", "{} epochs", (8, 16), 10, tuple(DIGITS.strip().splitlines())),
    "language": Task(
        "stdlib_lm_plain", "tok", "{:,} bytes", (100_000, 200_000), 3, tuple(LANGUAGE.strip().splitlines())
    ),
}


@dataclass(frozen=True)
class Ratio:
    """A ratio of cost to the target, and the standard error of it."""

    value: float
    error: float

    def __str__(self) -> str:
        if self.value > RANGE:
            return f"> {RANGE:g}"
        if self.value < 1 / RANGE:
            return f"< {1 / RANGE:g}"
        return f"{self.value:.2f} ± {self.error:.2f}"


def log_ratio(plain: Sequence[Sequence[float]], changed: Sequence[Sequence[float]]) -> float:
    """Return the natural logarithm of changed's cost to plain's cost, for the same error.

    Args:
        plain: errors of the plain recipe, one list of seeds for each of `FACTORS`.
        changed: those with a change.
    """
    before, after = ([math.log(statistics.fmean(one)) for one in errors] for errors in (plain, changed))
    slope = statistics.linear_regression([math.log(factor) for factor in FACTORS], before).slope
    if slope >= 0:
        raise ValueError("the plain recipe is no better with a larger budget: train more seeds")
    return (statistics.fmean(after) - statistics.fmean(before)) / -slope


def ratio(plain: Sequence[Sequence[float]], changed: Sequence[Sequence[float]]) -> Ratio:
    """Return what `log_ratio` does as a ratio, with its standard error; at least two seeds."""
    count = len(plain[0])
    value = math.exp(log_ratio(plain, changed))
    without = [
        log_ratio(*([[*one[:seed], *one[seed + 1 :]] for one in errors] for errors in (plain, changed)))
        for seed in range(count)
    ]
    return Ratio(value, value * math.sqrt((count - 1) * statistics.pvariance(without)))


def row(task: Task, change: str, done: Mapping[Run, Result], seeds: Sequence[int]) -> list[Ratio]:
    """Return the cells of a change: the ratio of budgets and of CPU time, at each B."""
    cells = []
    for budget in task.budgets:
        plain, changed = (
            [[done[task.run(one, budget * factor, seed)] for seed in seeds] for factor in FACTORS]
            for one in ("", change)
        )
        cost = ratio(*([[one.error for one in each] for each in found] for found in (plain, changed)))
        usual, spent = ([one.seconds for each in found for one in each] for found in (plain, changed))
        # The median, because now and then a run shares its core.
        time = statistics.median(after / before for before, after in zip(usual, spent, strict=True))
        cells += [cost, Ratio(cost.value * time, cost.error * time)]
    return cells


def table(task: Task, changes: Sequence[str], done: Mapping[Run, Result], seeds: Sequence[int]) -> str:
    """Return the table in Markdown, the cheapest at the larger budget first."""
    rows = {change: row(task, change, done, seeds) for change in changes}
    labels = [task.label.format(budget) for budget in task.budgets]
    what = "epochs" if task.unit == "ep" else "bytes"
    lines = [
        f"| change to `{task.recipe}`, n={len(seeds)} | "
        + " | ".join(f"{label}: {what} | CPU time" for label in labels)
        + " |",
        "|---|" + "---|---|" * len(labels),
    ]
    for change, cells in sorted(rows.items(), key=lambda one: one[1][2].value):
        # Only what is counted is bold: how far timing can be trusted, the standard error does not know.
        bold = [place % 2 == 0 and abs(cell.value - 1) > 2 * cell.error for place, cell in enumerate(cells)]
        shown = [f"**{cell}**" if is_bold else f"{cell}" for cell, is_bold in zip(cells, bold, strict=True)]
        lines.append(f"| `{change}` | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def write(name: str, text: str, path: Path) -> None:
    """Put a table between its two marks in a file."""
    begin, end = f"<!-- {name}: benchmarks/algorithms.py -->", "<!-- end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", path.read_text(), count=1))


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, help="one of them; default: both")
    parser.add_argument("--only", help="changes that contain this word; default: all")
    parser.add_argument("--seeds", type=int, help="for each budget, at least 2; default: 10 and 3")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, one thread each (default 2)")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "algorithms.jsonl", help="what was trained")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/algorithms.md")
    arguments = parser.parse_args()
    for name, task in TASKS.items():
        if arguments.task not in (None, name):
            continue
        seeds = seeds_from(FIRST_SEED, arguments.seeds or task.seeds)
        changes = [change for change in task.changes if (arguments.only or "") in change]
        # Seed by seed, so that plain and changed runs meet the same moments of a busy machine.
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
