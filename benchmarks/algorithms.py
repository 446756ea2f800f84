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
budget: the median of runs, so leave the machine alone meanwhile. Ratios beyond 4 either way are outside of what was
trained, and shown as such.

Each seed is a pair of runs, and the rest is what `runner verdict` does with pairs: brackets hold the 95 % interval of
the difference at the slope that was found, and a ratio is bold where the sign-flip test tells it from 1, corrected by
Holm's method for all changes at that budget.

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
from itertools import chain
from pathlib import Path

from _runs import ROOT, Result, Run, results, seeds_from

from runner.comparing.decision import LEVEL, Samples, count_needed, decide

RANGE = 4.0  # ratios that half to twice a budget can show, either way
FACTORS = (0.5, 1.0, 2.0)
FIRST_SEED = 1000  # settings were chosen with others

# Algorithms that have no row, and why.
NOT_MEASURED = {
    "compile": "compiling takes longer than these runs",
    "cuda_graph": "needs a GPU",
    "cudnn_benchmark": "needs a GPU",
    "ddp": "does nothing in a single process",
    "float8": "needs a GPU",
    "gyro_dropout": "takes the place of dropout, which neither recipe has",
    "low_precision_group_norm": "does nothing in 32 bits",
    "low_precision_layer_norm": "does nothing in 32 bits",
    "no_op_model": "trains nothing",
    "spike_guard": "does nothing in runs without spikes, as these are",
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
    "digits": Task("digits_plain", "ep", "{} epochs", (8, 16), 11, tuple(DIGITS.strip().splitlines())),
    "language": Task(
        "stdlib_lm_plain", "tok", "{:,} bytes", (100_000, 200_000), 11, tuple(LANGUAGE.strip().splitlines())
    ),
}


@dataclass(frozen=True)
class Ratio:
    """A ratio of cost to the target, the bounds of its 95 % interval, and whether it is known not to be 1."""

    value: float
    low: float
    high: float
    is_decided: bool = False

    def times(self, factor: float) -> Ratio:
        """Return the ratio of a cost that is `factor` times this one; its noise is unknown."""
        return Ratio(self.value * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        if self.value > RANGE:
            return f"> {RANGE:g}"
        if self.value < 1 / RANGE:
            return f"< {1 / RANGE:g}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


Errors = Sequence[Sequence[float]]
"""One list for each of `FACTORS`, with an error for each seed."""


def ratios(plain: Errors, changed: Sequence[Errors]) -> list[Ratio]:
    """Return the cost of each of several changes, as a ratio to the plain recipe's for the same error.

    Args:
        plain: errors of the plain recipe, of at least two seeds.
        changed: those with each change.

    Raises:
        ValueError: the plain recipe is no better with a larger budget, so that there is no cost of an error.
    """
    usual = [math.log(statistics.fmean(one)) for one in plain]
    slope = statistics.linear_regression([math.log(factor) for factor in FACTORS], usual).slope
    if slope >= 0:
        raise ValueError("the plain recipe is no better with a larger budget: train more seeds")
    seeds = [str(seed) for seed in range(len(plain[0]))]
    found = decide([Samples(_by_seed(plain), _by_seed(one), seeds) for one in changed])
    costs = [[math.exp(one / -slope) for one in (each.difference, *(each.interval or ()))] for each in found]
    return [Ratio(*cost, is_decided=each.is_decided) for cost, each in zip(costs, found, strict=True)]


def _by_seed(errors: Errors) -> list[float]:
    """Return the mean log error over the budgets, of each seed."""
    return [statistics.fmean(map(math.log, same)) for same in zip(*errors, strict=True)]


def rows(
    task: Task, changes: Sequence[str], done: Mapping[Run, Result], seeds: Sequence[int]
) -> dict[str, list[Ratio]]:
    """Return the cells of each change: the ratio of budgets and of CPU time, at each B."""
    cells: dict[str, list[Ratio]] = {change: [] for change in changes}
    for budget in task.budgets:
        trained = {
            change: [[done[task.run(change, budget * factor, seed)] for seed in seeds] for factor in FACTORS]
            for change in ("", *changes)
        }
        errors = {change: [[one.error for one in each] for each in found] for change, found in trained.items()}
        costs = ratios(errors[""], [errors[change] for change in changes])
        for change, cost in zip(changes, costs, strict=True):
            pairs = zip(chain(*trained[""]), chain(*trained[change]), strict=True)
            # The median, because now and then a run shares its core.
            time = statistics.median(after.seconds / before.seconds for before, after in pairs)
            cells[change] += [cost, cost.times(time)]
    return cells


def table(task: Task, changes: Sequence[str], done: Mapping[Run, Result], seeds: Sequence[int]) -> str:
    """Return the table in Markdown, the cheapest at the larger budget first."""
    labels = [task.label.format(budget) for budget in task.budgets]
    what = "epochs" if task.unit == "ep" else "bytes"
    lines = [
        f"| change to `{task.recipe}`, n={len(seeds)} | "
        + " | ".join(f"{label}: {what} | CPU time" for label in labels)
        + " |",
        "|---|" + "---|---|" * len(labels),
    ]
    for change, cells in sorted(rows(task, changes, done, seeds).items(), key=lambda one: one[1][2].value):
        shown = [f"**{cell}**" if cell.is_decided else f"{cell}" for cell in cells]
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
    parser.add_argument("--seeds", type=int, help="for each budget, at least 2; default: 11")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, one thread each (default 2)")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "algorithms.jsonl", help="what was trained")
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
