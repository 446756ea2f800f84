"""The key `budget`: the time or compute that a run may use, and the number of batches that it allows.

The number of batches is measured once, before training, and the run's config then holds both, as in
'5m of training = 1234ba', so that a resumed run and a rerun train the same number of batches.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from runner.failures.errors import WrongKey
from runner.timing.time import Time, TimeUnit

PARTS = ("training", "evaluation", "all")
_FORM = re.compile(r"(\S+)(?: of (\w+))?(?: = ([1-9]\d*)ba)?")
_FLOP = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)flop")


@dataclass(frozen=True)
class Budget:
    """A budget of wall-clock time, or of floating-point operations.

    Attributes:
        amount: the time or number as text, such as '5m' or '1e12flop'.
        of: the work that counts against the budget: 'training', 'evaluation', or 'all' for both.
        batches: the number of batches that the budget allows; None before it is measured.
    """

    amount: str
    of: str = "training"
    batches: int | None = None

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Return the budget that a text describes, as a user types it or as a run's config holds it.

        Raises:
            WrongKey: the value is neither a wall-clock time above 0, optionally `of` something, nor a number of
                floating-point operations.
        """
        match = _FORM.fullmatch(value) if isinstance(value, str) else None
        if match is not None and match[2] is None and (number := _FLOP.fullmatch(match[1])):
            if 0 < float(number[1]) < math.inf:
                return cls(match[1], batches=int(match[3]) if match[3] else None)
            raise WrongKey("budget", "must be a number of operations above 0, such as 1e12flop", repr(value))
        reason = "must be wall-clock time above 0, such as 5m, '1h30m of all' or '90s of evaluation'; or 1e12flop"
        if match is None or (match[2] or "training") not in PARTS:
            raise WrongKey("budget", f"{reason}: of {', '.join(PARTS[:-1])} or {PARTS[-1]}", repr(value))
        try:
            time = Time.parse(match[1])
        except ValueError:
            raise WrongKey("budget", reason, repr(value)) from None
        if time.unit is not TimeUnit.SECOND or not time.value:
            raise WrongKey("budget", f"{reason}; trainer.max_duration takes other lengths", repr(value))
        return cls(match[1], match[2] or "training", int(match[3]) if match[3] else None)

    @property
    def flop(self) -> float | None:
        """The floating-point operations of training; None if this is a budget of time."""
        match = _FLOP.fullmatch(self.amount)
        return None if match is None else float(match[1])

    @property
    def seconds(self) -> float:
        """The time in seconds, if this is a budget of time."""
        return float(Time.parse(self.amount).value)

    @property
    def doubled(self) -> str:
        """Twice this budget, as text that `parse` takes."""
        if self.flop is not None:
            return f"{2 * self.flop:g}flop"
        return f"{2 * self.seconds:g}s" + f" of {self.of}" * (self.of != "training")

    @property
    def limit(self) -> str:
        """The budget without its batches, such as '5m of training'; runs with equal limits have the same budget."""
        return f"{self.amount} of {self.of}" if self.flop is None else f"{self.flop:g}flop"

    def __str__(self) -> str:
        return self.limit if self.batches is None else f"{self.limit} = {self.batches}ba"
