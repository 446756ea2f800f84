"""Measures how busy the machine is while a run trains, because times are comparable only under equal load."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

UNEQUAL = 0.1
"""Times are not comparable if the share of the cores taken by other work differs by this much."""
LEAST = 1.0  # seconds; the system counts in hundredths, too coarse for shorter times


class LoadMeter:
    """Measures the load of the machine, and how much of it other work causes, since the meter was created.

    Reading the system's counters, once at the start and once at the end, takes a few milliseconds.
    """

    def __init__(self) -> None:
        self._start = _load_per_core()
        self._began = time.monotonic()
        self._before = _cpu_seconds()

    def read(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return the load so far.

        Args:
            before: the load of the run's earlier sessions.
            seconds: the length of those sessions.

        Returns:
            'start' and 'end': running and waiting processes per core, averaged over the minute before. 'others': the
            mean share of all cores, from 0 to 1, that processes outside this run took, earlier sessions included. A key
            is missing if the system does not report it.
        """
        elapsed = time.monotonic() - self._began
        load = {"start": before.get("start", self._start), "end": _load_per_core()}
        after = _cpu_seconds()
        if self._before is not None and after is not None and elapsed >= LEAST:
            busy, own = (end - start for end, start in zip(after, self._before, strict=True))
            other_work = min(1.0, max(0.0, (busy - own) / (elapsed * (os.cpu_count() or 1))))
            share = elapsed / (elapsed + seconds) if "others" in before else 1.0
            load["others"] = share * other_work + (1 - share) * before.get("others", 0.0)
        elif "others" in before:
            load["others"] = before["others"]
        return {name: round(value, 3) for name, value in load.items() if value is not None}


def describe_inequality(loads: Iterable[Mapping[str, float]]) -> str | None:
    """Return a sentence if other work took much more of the machine in some runs than in others, else None."""
    other_work = [load["others"] for load in loads if "others" in load]
    if not other_work or max(other_work) - min(other_work) < UNEQUAL:
        return None
    shares = f"other work took {min(other_work):.0%} to {max(other_work):.0%} of the machine"
    return f"{shares} while these runs trained, so their times cannot be compared"


def _load_per_core() -> float | None:
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (OSError, AttributeError):  # not available on every system
        return None


def _cpu_seconds() -> tuple[float, float] | None:
    """Return the CPU seconds of all processes, and those of this process with its children; None if unknown."""
    with suppress(ImportError, OSError):
        import psutil

        with suppress(psutil.Error):
            times = psutil.cpu_times()._asdict()
            idle = sum(times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
            this = psutil.Process()
            own = 0.0
            for process in (this, *this.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    own += sum(process.cpu_times()[:4])  # includes children that have ended
            return sum(times.values()) - idle, own
    return None
