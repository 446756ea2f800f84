"""Uses one CPU thread for training steps that are too short to gain from a second."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from runner.distributed.threads import use_one_thread

if TYPE_CHECKING:
    from runner.core.state import State

SHORT = 3e8
"""A short step has fewer floating-point operations than this, about 5 ms on one core; see `benchmarks/threads.py`."""


def use_one_thread_if_short(state: State) -> None:
    """Let torch compute with one thread if training steps are short, unless the user asked for another number.

    In short steps, waiting for other threads costs as much as they save, and many times that on a busy machine. The
    decision depends on the config alone, never on a measurement, so the same command gives the same numbers. Nothing
    changes for steps on a GPU, models that cannot count their operations, and data read from files.
    """
    from runner.data.loaders import TensorLoader  # imports torch

    loader = state.train_dataloader
    if state.device.type != "cpu" or not isinstance(loader, TensorLoader):
        return
    operations = None
    with suppress(Exception):  # if the batch does not fit the model, the first forward pass reports it
        operations = state.unwrapped_model.flops_per_batch(next(loader.first(1)))
    if operations is not None and operations < SHORT:
        use_one_thread()
