"""What is done where more metrics are logged than the store takes: say so, or send fewer."""

from __future__ import annotations

import math
import time
from typing import Any

from runner.callbacks._mlflow.spool import Sent

WINDOW = 30.0  # seconds over which the rate is measured, and by which sending may lie behind


class Thinning:
    """Chooses which metrics of a spool are sent, at most `rate` a second on average; all without a rate.

    A value is sent if at least n / `rate` seconds have passed since the last one of its key that was sent, where n is
    the number of keys so far and times are those of logging. Values that come more rarely are all sent. The last value
    of each key is sent with the run's status, and before a model, which is linked to it.

    Attributes:
        sent_at: time in milliseconds of the last value that was sent, by key.
        left_out: the last value that was not, with its step and time, by key, unless a later one was sent.
    """

    def __init__(self, rate: float | None, sent: Sent) -> None:
        self._rate = rate
        self.sent_at = dict(sent.sent_at)  # copies, because what is not sent in the end is chosen again
        self.left_out = dict(sent.left_out)

    def choose(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return an entry with only those of its metrics that are to be sent now."""
        if self._rate is None:
            return entry
        step, now = entry["s"], entry["t"]
        chosen = {}
        for key, value in entry["m"].items():
            if self._is_due(key, now):
                self.sent_at[key] = now
                self.left_out.pop(key, None)
                chosen[key] = value
            else:
                self.left_out[key] = [value, step, now]
        return {"m": chosen, "s": step, "t": now}

    def count(self, entry: dict[str, Any]) -> int:
        """Return how many metrics `choose` returns of the next entry at most; without a rate, exactly."""
        return sum(self._is_due(key, entry["t"]) for key in entry["m"])

    def _is_due(self, key: str, now: int) -> bool:
        """Return whether a value of a key, logged at this time in milliseconds, is to be sent."""
        last = self.sent_at.get(key)
        if self._rate is None or last is None:
            return True
        return abs(now - last) * self._rate >= 1000 * len(self.sent_at)  # a distance, as a clock may be set back

    def take_rest(self) -> list[dict[str, Any]]:
        """Return entries with the last value of each key that was not sent."""
        rest = [{"m": {key: value}, "s": step, "t": at} for key, (value, step, at) in self.left_out.items()]
        self.left_out.clear()
        return rest


class SendingRate:
    """Finds out whether values are logged faster than they are sent, while sending does not pause.

    Args:
        unsent: bytes of the spool that are not sent yet; infinity if a backlog is expected, as after an outage.
    """

    def __init__(self, unsent: float = math.inf) -> None:
        self._began = time.monotonic()
        self._unsent = unsent
        self._bytes = self._values = 0

    def note(self, values: int, sent: int, unsent: int) -> float | None:
        """Note that values were sent, with their bytes in the spool, and how many bytes of it are not sent yet.

        Returns:
            Values sent a second, if that is too few: there is more to send than a window before, and it would take
            longer than a window. Otherwise None, as where only files were sent.
        """
        self._values += values
        self._bytes += sent
        seconds = time.monotonic() - self._began
        if seconds < WINDOW:
            return None
        rate = self._values / seconds
        is_behind = rate > 0 and unsent > self._unsent and unsent * seconds > self._bytes * WINDOW
        self._began += seconds
        self._unsent = unsent
        self._bytes = self._values = 0
        return rate if is_behind else None
