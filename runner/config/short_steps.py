"""Training steps so short that a second CPU thread would not make them faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.distributed.threads import use_one_thread

if TYPE_CHECKING:
    from runner.core.state import State

SHORT = 3e8
"""Floating-point operations of a short step, about 5 ms of one core, see `benchmarks/threads.py`."""


def use_one_thread_if_short(state: State) -> None:
    """Let torch compute with one thread if training steps are short, unless a user asked for another number.

    Threads that wait for one another then cost as much as they save, and many times that on a machine where others work
    too. It depends on the config alone, never on a measurement, so that the same command gives the same numbers. Steps
    on a GPU, of models that cannot tell their operations, and on data that is read from files are left as they are.
    """
    from runner.data.loaders import TensorLoader  # imports torch

    loader = state.train_dataloader
    if state.device.type != "cpu" or not isinstance(loader, TensorLoader):
        return
    operations = state.unwrapped_model.flops_per_batch(next(loader.first(1)))
    if operations is not None and operations < SHORT:
        use_one_thread()
