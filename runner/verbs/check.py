"""`runner check`: does everything that a run does except train on its data, in seconds, and writes nothing.

It checks the arguments of every class in the config, builds and measures the model, and sends one batch through all
events. Most failures of training are errors here too; probable mistakes are warnings. The batch is made up if possible,
otherwise read from the data. `runner check RUN` checks whether a run can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from runner.config.experiment import Experiment
from runner.records.job import Job
from runner.terminal.answer import plain, set_fields
from runner.terminal.console import print_block

if TYPE_CHECKING:
    from runner.trials.dry_run import Findings


def run(job: Job) -> None:
    """Print what a run would do, or raise an error that explains what is wrong. Rank 0 only.

    `runner.trials.dry_run` sends the batch, and `runner.trials.lint` finds the mistakes.
    """
    from runner.trials.dry_run import try_out

    findings = try_out(job.experiment, job.choices, job.resume)
    set_fields(result={"overrides": job.overrides, **plain(asdict(findings))})
    print_block(job.title, report(job.experiment, findings))


def report(experiment: Experiment, findings: Findings) -> Iterator[tuple[str, str]]:
    """Yield the lines of the report, as labels and texts."""
    sizes = findings.sizes
    trainable = "all" if sizes.trainable == sizes.parameters else f"{sizes.trainable:,}"
    yield "ok config", f"{len([*experiment.sections()])} targets bound; every key is used"
    yield "ok model", f"{findings.model}, {sizes.parameters:,} parameters, {trainable} trainable"
    if len(findings.groups) > 1:
        for group in findings.groups:
            yield "group", group
    yield "ok data", findings.data
    if findings.sample:
        yield "trained", f"what is in double brackets: {findings.sample}"
    device = "on the CPU" if findings.device == "cpu" else "on the meta device: shapes and types only"
    yield "ok batch", f"{findings.batch}: through {findings.events} events, {device}"
    names = ("weights", "gradients", "optimizer", "algorithms", "activations", "gathered")
    memory = {name: size for name in names if (size := getattr(sizes, name))}
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in memory.items())
    if sizes.peak:
        yield "memory", f"{show_bytes(sizes.peak)} per process at the peak of a step: {parts}"
    else:
        yield "memory", f"{show_bytes(sum(memory.values()))} per process without activations: {parts}"
    if findings.unpredicted:
        yield "no figure", findings.unpredicted
    yield "checkpoint", f"{show_bytes(sizes.checkpoint)}, including weights of {show_bytes(sizes.checkpoint_weights)}"
    if findings.destinations:
        yield "not run", f"{', '.join(findings.destinations)}: destinations, which would write, print or connect"
    if findings.refused:
        yield "not run", f"{', '.join(findings.refused)}: they read values, and tensors on the meta device have none"
    for warning in findings.warnings:
        yield "warning", warning


def show_bytes(size: int) -> str:
    """Return a number of bytes with three digits and a unit: '1.23 MB'."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
