"""One profile by torch, with named ranges, and the file that becomes of it."""

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
    """Whether a profiler records in this process: with a second one torch crashes, without an error."""
    import torch

    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


class TorchProfile:
    """A profile that begins with its warm-up.

    Args:
        device: whose kernels are recorded too.
        warmup: steps until it records.
        active: steps in which it records; then it ends.
        options: of torch.profiler.profile.
        done: called when it has ended, with torch's profile.
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
            **options,
        )
        self._steps = warmup + active
        self._ranges: dict[str, Any] = {}  # those that are open, the inner ones last
        self.range = profiler.record_function  # a context manager, given a name
        self._profile.start()

    def pass_event(self, event: Event) -> None:
        """Close and open the ranges between events."""
        if event in CLOSED_AT:
            self._leave(CLOSED_AT[event])
        if event in OPENED_AT:
            name = OPENED_AT[event]
            self._leave(name)  # with a training_step of the model's own no event closes it
            self._ranges[name] = self.range(name).__enter__()

    def step(self) -> bool:
        """Go on to the next step; return whether that was the last."""
        self._profile.step()
        return self._profile.step_num == self._steps

    def stop(self) -> None:
        """End it, wherever it is."""
        for name in [*self._ranges]:
            self._leave(name)
        self._profile.stop()

    def _leave(self, name: str) -> None:
        """Close a range and those that were opened within it."""
        while name in self._ranges:
            self._ranges.popitem()[1].__exit__(None, None, None)


def write_profile(profile: Any, path: Path) -> None:
    """Write the trace of torch's profile to a file, whole or not at all.

    Raises:
        OSError: the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    profile.export_chrome_trace(str(path))
    if not path.exists():  # torch keeps errors to itself; it writes to another name first, and leaves that behind
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        raise OSError(f"torch could not finish {path}; is the disk full?")
