"""`mode=check`: everything of a run but training, without its data, in seconds. Nothing is written.

Every target is bound, the model built and measured, and one batch goes through all events: see `trial`. What
cannot work is an error, as in training; what trains but is most likely a mistake is a warning: see `rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.composed import targets
from runner.distributed.job import Job
from runner.terminal import print_block

if TYPE_CHECKING:
    from runner.modes.dry_run import Findings


def check(job: Job) -> None:
    """Say what a run would be, or raise what is wrong with it. Rank 0 alone.

    Raises:
        WrongConfig: it cannot work.
    """
    from runner.modes.dry_run import try_out

    findings = try_out(job.config)
    print_block(title_of(job), report(job.config, findings))
    remove_empty(job)


def report(config: dict[str, Any], findings: Findings) -> Iterator[tuple[str, str]]:
    """Yield what was found out, as labels and texts."""
    sizes = findings.sizes
    trainable = "all" if sizes.trainable == sizes.parameters else f"{sizes.trainable:,}"
    yield "ok config", f"{len([*targets(config)])} targets bound; no key that nobody reads"
    yield "ok model", f"{findings.model}, {sizes.parameters:,} parameters, {trainable} trainable"
    yield "ok data", findings.data
    where = "on the CPU" if findings.device == "cpu" else "on the meta device: shapes and types only"
    yield "ok batch", f"{findings.batch}: through {findings.events} events, {where}"
    memory = {name: getattr(sizes, name) for name in ("weights", "gradients", "optimizer", "algorithms")}
    total = show_bytes(sum(memory.values()))
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in memory.items() if size)
    yield "memory", f"{total} a process, activations aside: {parts}"
    yield "checkpoint", f"{show_bytes(sizes.checkpoint)}, of it weights {show_bytes(sizes.checkpoint_weights)}"
    if findings.destinations:
        yield "not run", f"{', '.join(findings.destinations)}: destinations, which would write, print or connect"
    if findings.refused:
        yield "not run", f"{', '.join(findings.refused)}: they read values, which the meta device has not"
    for doubt in findings.doubts:
        yield "warning", doubt


def title_of(job: Job) -> str:
    """Return what was typed, by which jobs of a sweep are told apart."""
    return " ".join(one for one in job.overrides if not one.startswith("mode=")) or "the default run"


def remove_empty(job: Job) -> None:
    """Remove the folder that was made for a run that is not to be."""
    with suppress(OSError):
        Path(job.run_dir).rmdir()


def show_bytes(size: int) -> str:
    """Return a size as it is read."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
