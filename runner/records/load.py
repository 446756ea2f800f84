"""How busy the machine was while a run trained: times are comparable only under equal load."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

UNEQUAL = 0.1
"""Difference in the share of the cores that other work took, from which times are not comparable."""
LEAST = 1.0  # seconds below which the system's counters, in hundredths, are too coarse


class LoadMeter:
    """Measures from its creation on how much of the machine this run and all other work take.

    Two looks at the counters of the system, at the start and at the end, cost a few milliseconds each.
    """

    def __init__(self) -> None:
        self._start = _load_per_core()
        self._began = time.monotonic()
        self._before = _cpu_seconds()

    def read(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return the load so far, given that of the run's earlier sessions, and how many seconds these were.

        Returns:
            'start' and 'end': processes that ran or waited to run, per core, in the minute before. 'others': the mean
            share of all cores that processes outside of this run took, from 0 to 1; of earlier sessions too. A key is
            missing where the system does not say.
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
    except (OSError, AttributeError):  # not on every system
        return None


def _cpu_seconds() -> tuple[float, float] | None:
    """Return the CPU seconds of all processes, and of this one and those that it started; None if unknown."""
    with suppress(ImportError, OSError):
        import psutil

        with suppress(psutil.Error):
            times = psutil.cpu_times()._asdict()
            idle = sum(times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
            this = psutil.Process()
            own = 0.0
            for process in (this, *this.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    own += sum(process.cpu_times()[:4])  # with those of its own processes that have ended
            return sum(times.values()) - idle, own
    return None
