"""`runner lr-range`: trains briefly at a growing learning rate, and suggests the rate at which the loss falls fastest.

The rate grows by the same factor after each batch, from `--start` to `--end`, instead of following the schedule. All
parameter groups keep their ratios to `optimizer.lr`. Only the picture is kept. Use the rate as a starting point, or for
the peak of a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.command import Command
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.distributed.environment import is_rank_zero
from runner.failures.errors import WrongKey
from runner.files.whole import write_atomically
from runner.records.job import Job
from runner.terminal.answer import set_fields
from runner.terminal.console import print_block, show_path

if TYPE_CHECKING:
    from runner.trials.rising_rate import RisingRate

LEAST = 20
"""Fewest batches for a meaningful slope of the smoothed loss."""
FORMATS = (".png", ".svg", ".pdf")


def check(command: Command, experiment: Experiment) -> None:
    """Check that the options and the experiment fit the test."""
    options = command.options
    for key in ("start", "end"):
        if not 0 < options[key] < math.inf:
            raise WrongKey(f"--{key}", "must be a learning rate above 0", repr(options[key]))
    if options["end"] <= options["start"]:
        raise WrongKey("--end", f"must be larger than --start {options['start']:g}", repr(options["end"]))
    if options["batches"] < LEAST:
        raise WrongKey("--batches", f"too few to see a slope; give at least {LEAST}", repr(options["batches"]))
    if Path(options["picture"]).suffix not in FORMATS:
        raise WrongKey("--picture", f"must end in {', '.join(FORMATS)}", repr(options["picture"]))
    if "" not in experiment.optimizers:
        names = ", ".join(experiment.optimizers)
        raise WrongKey("optimizer", f"lr-range varies the rate of one optimizer, not {names}")
    rate = experiment.optimizers[""].get("lr")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        reason = "lr-range varies it, and keeps the ratios of parameter groups to it; give a number above 0"
        raise WrongKey("optimizer.lr", reason, repr(rate))


def run(job: Job) -> None:
    """Print a suggestion, and draw the loss over the learning rate. All ranks; only the picture is kept.

    The rule behind the suggestion is in `runner.trials.rising_rate`.
    """
    from runner.trials.rising_rate import RisingRate
    from runner.trials.trial import trial

    options = job.command.options
    lr = float(job.experiment.optimizers[""].get("lr"))
    rising = RisingRate(options["start"], options["end"], options["batches"], lr)
    length = {"max_duration": f"{options['batches']}ba", "scale_schedule_ratio": 1.0}
    experiment = job.experiment.changed(scheduler=None)
    with config_errors():
        with trial(experiment, {"trial": rising}, watched=False, schedulers=rising.multiplier, **length) as trainer:
            trainer.fit()
        if is_rank_zero():
            picture = Path(options["picture"])
            if (count := len(rising.losses)) < LEAST:
                early = f"the loss diverged after {count} batches, at {rising.diverged_at:.3g}"
                raise WrongKey("--start", f"{early}; give a smaller one", f"{options['start']:g}")
            picture.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(picture, _draw(job.title, rising, picture.suffix[1:]))
            print_block(job.title, [*_describe(rising), ("picture", show_path(picture))])
            measured = {"rates": rising.rates, "losses": rising.losses, "diverged_at": rising.diverged_at}
            set_fields(result={"suggestion": rising.suggest(), **measured, "picture": str(picture)})


def _describe(rising: RisingRate) -> Iterator[tuple[str, str]]:
    """Yield the lines of the report, as labels and texts."""
    rate = rising.suggest()
    last = rising.rates[-1]
    smoothed = rising.smoothed
    lowest = min(smoothed)
    lowest_at = rising.rates[smoothed.index(lowest)]
    if rate is None:
        yield "warning no rate", f"the loss never fell, from {rising.rates[0]:.3g} to {last:.3g}; look at the plot"
    else:
        yield "ok suggestion", f"optimizer.lr={float(f'{rate:.2g}')!r}"
    yield "lowest loss", f"{lowest:.4g} (smoothed) at {lowest_at:.3g}"
    if rising.diverged_at is None:
        yield "warning end", f"the loss has not diverged by {last:.3g}; a larger --end shows when it does"
    else:
        yield "diverged", f"at {rising.diverged_at:.3g}, after {len(rising.losses)} batches"


def _draw(title: str, rising: RisingRate, kind: str) -> bytes:
    """Return the picture of a test as the content of a file of type `kind`, such as 'png'."""
    from runner.pictures.figure import COLORS, GRAY, add_legend, make_figure, render, scale, shorten, style

    with style():
        figure = make_figure(6.0, 3.8)
        axes = figure.add_subplot()
        axes.set_title(shorten(title, 70))
        smoothed = rising.smoothed
        handles = [*axes.plot(rising.rates, rising.losses, color=GRAY, linewidth=1)]
        handles += axes.plot(rising.rates, smoothed, color=COLORS[0], linewidth=2)
        labels = ["loss", "smoothed"]
        if (rate := rising.suggest()) is not None:
            handles.append(axes.axvline(rate, color=COLORS[1], linestyle="--", linewidth=1.5))
            labels.append(f"steepest, {rate:.2g}")
        axes.set(xlabel="learning rate", ylabel="training loss")
        scale(axes, "x", rising.rates, decades=0.0)
        until = rising.losses[: smoothed.index(min(smoothed)) + 1]
        margin = 0.3 * (max(until) - min(until))
        axes.set_ylim(min(until) - margin, max(until) + margin)  # a diverging loss leaves the plot
        add_legend(axes, handles, labels, loc="lower left")
    return render(figure, kind)
