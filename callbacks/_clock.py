"""Units in which callbacks log time, and a clock that waits for the device."""

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
    """Return a clock reading in seconds after the device has finished its queued work: a host-device sync on CUDA."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_event() -> Any:
    """Return an event of the CUDA device."""
    import torch

    return torch.cuda.Event(enable_timing=True)


class DeviceStopwatch:
    """Seconds that a CUDA device takes from one point of its queue to another, known once it is there.

    The host may be far ahead of the device, so its own clock says how long it takes to ask, not to compute.
    """

    def __init__(self) -> None:
        self._started: Any = None
        self._laps: deque[tuple[Any, Any, Any]] = deque()

    def start(self) -> None:
        """Start a lap here in the queue."""
        self._started = make_event()
        self._started.record()

    def stop(self, label: Any) -> None:
        """End the lap here in the queue."""
        stopped = make_event()
        stopped.record()
        self._laps.append((self._started, stopped, label))

    def passed(self, wait: bool = False) -> Iterator[tuple[float, Any]]:
        """Yield the seconds and the label of each lap that the device has completed, or of all, waiting for it."""
        if wait and self._laps:
            self._laps[-1][1].synchronize()
        while self._laps and self._laps[0][1].query():
            started, stopped, label = self._laps.popleft()
            yield started.elapsed_time(stopped) / 1000, label
