"""Records a torch profile with named ranges, and writes it to a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import Event
from runner.callbacks._event_ranges import CLOSED_AT, OPENED_AT

if TYPE_CHECKING:
    import torch


def is_profiled() -> bool:
    """Return whether a profiler is active in this process. Starting a second one would crash without an error."""
    import torch

    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


class TorchProfile:
    """A torch profile, which starts its warm-up at once.

    After `warmup` steps it records `active` steps, on CUDA including the device's kernels, and then calls `done` with
    torch's profile.
    """

    def __init__(
        self,
        device: torch.device,
        warmup: int,
        active: int,
        options: dict[str, Any],
        done: Callable[[Any], None],
    ) -> None:
        from torch import profiler

        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise Kineto prints when it starts and stops
        gpu = [profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, *gpu],
            schedule=profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1),
            on_trace_ready=done,
            acc_events=True,  # otherwise torch 2.11 warns of losing events of earlier cycles, though there is only one
            **options,
        )
        self._steps = warmup + active
        self._ranges: dict[str, Any] = {}  # open ranges, innermost last
        self.range = profiler.record_function  # makes a context manager from a name
        self._profile.start()

    def pass_event(self, event: Event) -> None:
        """Close the ranges that end at an event, and open those that begin there."""
        if event in CLOSED_AT:
            self._leave(CLOSED_AT[event])
        if event in OPENED_AT:
            name = OPENED_AT[event]
            self._leave(name)  # no event closes it if the model has its own `training_step`
            self._ranges[name] = self.range(name).__enter__()

    def step(self) -> bool:
        """Advance to the next step, and return whether the profile has ended."""
        self._profile.step()
        return self._profile.step_num == self._steps

    def stop(self) -> None:
        """End the profile at the current step."""
        for name in [*self._ranges]:
            self._leave(name)
        self._profile.stop()

    def _leave(self, name: str) -> None:
        """Close a range and those opened inside it."""
        while name in self._ranges:
            self._ranges.popitem()[1].__exit__(None, None, None)


def write_profile(profile: Any, path: Path) -> None:
    """Write torch's profile to a file as a trace, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    profile.export_chrome_trace(str(path))
    if not path.exists():  # torch raises no error, and leaves its temporary file behind
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        raise OSError(f"torch could not finish {path}; is the disk full?")
