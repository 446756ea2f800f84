"""Detects that a run logs more metrics than the store can take, and thins them out if the user sets a rate."""

from __future__ import annotations

import math
import time
from typing import Any

from runner.callbacks._mlflow.spool import Sent

WINDOW = 30.0  # seconds over which the rate is measured, and by which sending may lag


class Thinning:
    """Chooses the metrics of a spool to send: at most `rate` a second on average, or all without a rate.

    A value is sent if it was logged at least n / `rate` seconds after the last sent value of its key, where n is the
    number of keys so far. Keys that are logged less often lose no value. The last value of each key is always sent:
    before the run's status, and before a model, which is linked to it.

    Attributes:
        sent_at: time in milliseconds of the last sent value, by key.
        left_out: last unsent value with its step and time, by key, unless a later value was sent.
    """

    def __init__(self, rate: float | None, sent: Sent) -> None:
        self._rate = rate
        self.sent_at = dict(sent.sent_at)  # copies, because a failed send is repeated with the old state
        self.left_out = dict(sent.left_out)

    def choose(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return an entry with only those of its metrics that are due."""
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
        """Return the most metrics that `choose` can return for the next entry; without a rate, the exact number."""
        return sum(self._is_due(key, entry["t"]) for key in entry["m"])

    def _is_due(self, key: str, now: int) -> bool:
        """Return whether to send a value of a key that was logged at this time in milliseconds."""
        last = self.sent_at.get(key)
        if self._rate is None or last is None:
            return True
        return abs(now - last) * self._rate >= 1000 * len(self.sent_at)  # absolute, because a clock may be set back

    def take_left_out(self) -> list[dict[str, Any]]:
        """Return entries with the last value of each key that is not sent yet."""
        entries = [{"m": {key: value}, "s": step, "t": at} for key, (value, step, at) in self.left_out.items()]
        self.left_out.clear()
        return entries


class SendingRate:
    """Detects whether values are logged faster than they are sent, while sending does not pause.

    Args:
        unsent: bytes of the spool that are not sent yet; infinity if a backlog is expected, such as after an outage.
    """

    def __init__(self, unsent: float = math.inf) -> None:
        self._began = time.monotonic()
        self._unsent = unsent
        self._bytes = self._values = 0

    def note(self, values: int, sent: int, unsent: int) -> float | None:
        """Record that `values` values, `sent` bytes of the spool, were sent, and that `unsent` bytes are left.

        Returns:
            Values sent per second, if that is too slow: more bytes are left than a window ago, and sending them would
            take longer than a window. Otherwise None, such as when only files were sent.
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
