"""Records one torch profile with named ranges, and writes it to a file."""

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
    """Return whether a profiler records in this process: torch crashes without an error when a second one starts."""
    import torch

    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


class TorchProfile:
    """A torch profile that starts with its warm-up.

    It records `active` steps after `warmup` others, on CUDA with the device's kernels, and then calls `done` with
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

        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it prints when it starts and stops
        gpu = [profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, *gpu],
            schedule=profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1),
            on_trace_ready=done,
            acc_events=True,  # otherwise torch 2.11 warns of cycles before this one, of which there are none
            **options,
        )
        self._steps = warmup + active
        self._ranges: dict[str, Any] = {}  # open ranges, innermost last
        self.range = profiler.record_function  # makes a context manager from a name
        self._profile.start()

    def pass_event(self, event: Event) -> None:
        """Close and open the ranges that end or begin at an event."""
        if event in CLOSED_AT:
            self._leave(CLOSED_AT[event])
        if event in OPENED_AT:
            name = OPENED_AT[event]
            self._leave(name)  # no event closes it if the model has its own training_step
            self._ranges[name] = self.range(name).__enter__()

    def step(self) -> bool:
        """Advance to the next step, and return whether the profile has ended."""
        self._profile.step()
        return self._profile.step_num == self._steps

    def stop(self) -> None:
        """End the profile, at whatever step it is."""
        for name in [*self._ranges]:
            self._leave(name)
        self._profile.stop()

    def _leave(self, name: str) -> None:
        """Close a range and the ranges opened inside it."""
        while name in self._ranges:
            self._ranges.popitem()[1].__exit__(None, None, None)


def write_profile(profile: Any, path: Path) -> None:
    """Write torch's profile to a file as a trace, whole or not at all.

    Raises:
        OSError: the disk refused the write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    profile.export_chrome_trace(str(path))
    if not path.exists():  # torch reports no error, and leaves its temporary file behind
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        raise OSError(f"torch could not finish {path}; is the disk full?")
