"""Units in which callbacks log time, and a clock that waits for the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}

SAMPLING = 0.05
"""Minimum seconds between two values of a gauge; charts cannot show more detail."""


def seconds_in(time_unit: str) -> float:
    """Return the number of seconds in a unit of time.

    Raises:
        ValueError: `time_unit` is not a known unit.
    """
    if time_unit not in SECONDS:
        raise ValueError(f"time_unit={time_unit!r}: must be one of {', '.join(map(repr, SECONDS))}")
    return SECONDS[time_unit]


def wait_and_read_clock(device: torch.device) -> float:
    """Return a clock reading in seconds after the device has finished its queued work: a host-device sync on CUDA."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()
