"""Units of logged times, and clocks for work that is queued on the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from runner.failures.checks import check_one_of

if TYPE_CHECKING:
    import torch

SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}

SAMPLING = 0.05
"""Minimum seconds between two values of a gauge; charts cannot show more detail."""


def seconds_in(time_unit: str) -> float:
    """Return the number of seconds in a unit of time."""
    check_one_of("time_unit", time_unit, SECONDS)
    return SECONDS[time_unit]


def wait_and_read_clock(device: torch.device) -> float:
    """Wait for the device to finish its queued work, and return the time in seconds. A host-device sync on CUDA."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_event() -> Any:
    """Return a CUDA event that records its time."""
    import torch

    return torch.cuda.Event(enable_timing=True)


class DeviceStopwatch:
    """Measures the seconds that a CUDA device takes between two points in its queue, without waiting for it.

    The host may be far ahead of the device, so its clock measures how long kernels take to launch, not to run.
    """

    def __init__(self) -> None:
        self._started: Any = None
        self._laps: deque[tuple[Any, Any, Any]] = deque()

    def start(self) -> None:
        """Start a lap at the current end of the queue."""
        self._started = make_event()
        self._started.record()

    def stop(self, label: Any) -> None:
        """End the lap at the current end of the queue."""
        stopped = make_event()
        stopped.record()
        self._laps.append((self._started, stopped, label))

    def completed_laps(self, wait: bool = False) -> Iterator[tuple[float, Any]]:
        """Yield the seconds and the label of each lap that the device has completed; with `wait`, wait for all laps."""
        if wait and self._laps:
            self._laps[-1][1].synchronize()
        while self._laps and self._laps[0][1].query():
            started, stopped, label = self._laps.popleft()
            yield started.elapsed_time(stopped) / 1000, label
