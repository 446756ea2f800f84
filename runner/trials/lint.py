"""Finds probable mistakes in an experiment that do not prevent training.

Faults that prevent training are errors, raised by the same code as in training: a warm-up longer than the schedule, a
`max_duration` in tokens with a model that does not count them, a monitored metric that is not computed, algorithms that
cannot be combined, a precision that the device does not support. These are warnings:

- an interval or a patience that is longer than the run;
- a monitored metric of an evaluator while `trainer.eval_interval=0`;
- a batch that is larger than the data, or smaller than the number of processes;
- more microbatches than a batch has samples, or microbatches larger than the batch;
- `amp_fp16` on a CPU;
- parameters that no gradient reaches (in `runner.trials.dry_run`), and outputs that went through a softmax before cross
  entropy (in `runner.models.first_loss`);
- keys that a class takes as `**options`, and so may ignore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner.config.experiment import Experiment
from runner.config.signatures import default_of
from runner.timing.time import Progress, Time, convert

TOO_LONG = {
    "interval": "it happens only at the end, if at all",
    "patience": "training never stops early",
}
"""The consequence if the value of a key is longer than the run, by the suffix of the key."""


def find_mistakes(experiment: Experiment, progress: Progress, order: Any, device: str) -> Iterator[str]:
    """Yield probable mistakes as sentences that begin with the key and its value."""
    yield from _too_long(experiment, progress)
    yield from _never_evaluated(experiment)
    yield from _batches(experiment, order)
    if experiment.trainer.get("precision") == "amp_fp16" and device == "cpu":
        yield "trainer.precision='amp_fp16' on a CPU saves nothing and is slow: use fp32 or amp_bf16"
    for section in experiment.sections():
        for key in section.unchecked():
            options = f"the **options of {section.target}"
            yield f"{section.path}.{key} goes into {options}, which may ignore it"


def _too_long(experiment: Experiment, progress: Progress) -> Iterator[str]:
    duration = progress.max_duration
    for section in experiment.sections():
        path = section.path
        if path.partition(".")[0] not in ("trainer", "callbacks", "algorithms"):
            continue
        for key, value in section.plain.items():
            effect = next((text for end, text in TOO_LONG.items() if key.endswith(end)), None)
            if effect is None or not isinstance(value, str | int) or isinstance(value, bool):
                continue
            if key.endswith("interval") and value == default_of(path, section.plain, key):
                continue  # it is the default, not something that the user chose
            try:
                length = convert(Time.parse_or_epochs(value), duration.unit, duration, progress.batches_per_epoch)
            except ValueError:
                continue  # not a time, or its unit cannot be converted to that of the run's length
            if length > duration.exact:
                yield f"{path}.{key}={value!r} is longer than the run of {str(duration)!r}: {effect}"


def _never_evaluated(experiment: Experiment) -> Iterator[str]:
    interval = experiment.trainer.get("eval_interval", "1ep")
    if isinstance(interval, Mapping) or Time.parse_or_epochs(interval).value:
        return
    for key, section in experiment.callbacks.items():
        monitor = section.get("monitor")
        label = section.get("dataloader_label")
        if monitor is not None and label != "train" and not str(monitor).startswith("train/"):
            yield f"callbacks.{key}.monitor={monitor!r} is never computed: trainer.eval_interval is 0"


def _batches(experiment: Experiment, order: Any) -> Iterator[str]:
    if order is None:
        return
    batch = order.batch_size
    samples = order.num_samples
    if batch > samples:
        yield f"data.batch_size={batch} is more than the {samples:,} training samples: an epoch is one batch"
    ranks = experiment.launch.nproc_per_node
    ranks = ranks if isinstance(ranks, int) else 1
    if batch < ranks:
        yield f"data.batch_size={batch} is less than launch.nproc_per_node={ranks}: some processes have nothing to do"
    share = max(1, min(batch, samples) // ranks)
    parts = experiment.trainer.get("grad_accum", 1)
    size = experiment.trainer.get("microbatch_size")
    if parts > share:
        yield f"trainer.grad_accum={parts} is more than the {share} samples of a batch on each process"
    if isinstance(size, int) and size > share:
        yield f"trainer.microbatch_size={size} is more than the {share} samples of a batch on each process"
