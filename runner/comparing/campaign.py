"""A campaign: one error budget for many decisions, so that the thousandth is as honest as the first.

Of a thousand comparisons between equals at a level of 5 %, fifty find differences. A campaign limits the expected
share of wrong claims among all claims (the false discovery rate) to 5 % instead, however many comparisons follow. It
uses e-LOND: the t-th comparison claims a difference if its wealth reaches 1 / level_t, with

    level_t = 0.05 * weight_t * (claims before it + 1),

and weights that sum to 1 over all t. Since a wealth stays valid at any stopping time, and under any dependence between
comparisons, the bound holds if they share runs or ideas, and if what is compared next depends on every result so far.

Source: Xu and Ramdas, Online multiple testing with e-values, 2024 (arXiv:2311.06412).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.comparing.decision import LEVEL
from runner.failures.errors import WrongKey
from runner.files.lock import exclusive_lock
from runner.files.whole import read_object, write_atomically

FOLDER = "campaigns"
SUM_OF_WEIGHTS = 2.1098
"""The sum of 1 / (t log(t)^2) over t = 2, 3, ..., rounded up."""


def weight(number: int) -> float:
    """Return the share of the error budget of a comparison, numbered from 1; it falls slowly, and all sum to 1."""
    return 1 / (SUM_OF_WEIGHTS * (number + 1) * math.log(number + 1) ** 2)


@dataclass(frozen=True)
class Campaign:
    """A campaign in a file, which several processes may use at the same time.

    The level of a comparison is fixed when it enters, by the claims that are known by then.
    """

    path: Path

    @classmethod
    def named(cls, name: str, outputs: Path) -> Campaign:
        """Return the campaign with a name, in the file `campaigns/NAME.json` of a folder.

        Raises:
            WrongKey: the name cannot be a file's name.
        """
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise WrongKey("--campaign", "must be a name of letters, digits, _, . and -", repr(name))
        return cls(outputs / FOLDER / f"{name}.json")

    def enter(self, names: Mapping[str, str]) -> dict[str, float]:
        """Enter comparisons, unless they have entered before, and return the level of each.

        Args:
            names: a description of each comparison, by an id that is the same whenever it is continued.
        """

        def add(comparisons: dict[str, Any]) -> None:
            claims = sum(bool(comparison["claim"]) for comparison in comparisons.values())
            for id, name in names.items():
                level = LEVEL * weight(len(comparisons) + 1) * (claims + 1)
                comparisons.setdefault(id, {"name": name, "level": level, "claim": ""})

        comparisons = self._change(add)
        return {id: comparisons[id]["level"] for id in names}

    def claim(self, claims: Mapping[str, str]) -> None:
        """Record what was claimed about comparisons, such as 'better', by id."""

        def add(comparisons: dict[str, Any]) -> None:
            for id, claim in claims.items():
                comparisons[id]["claim"] = claim

        self._change(add)

    def _change(self, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Apply a change to the comparisons while no other process does, and return them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self.path.with_suffix(".lock"), "records a comparison", progress=lambda: 0):
            content = read_object(self.path)
            if self.path.exists() and "comparisons" not in content:
                raise WrongKey("--campaign", "its file is damaged; restore it, or choose another name", str(self.path))
            comparisons = content.get("comparisons", {})
            change(comparisons)
            written = {"false_discovery_rate": LEVEL, "comparisons": comparisons}
            write_atomically(self.path, json.dumps(written, indent=1))
        return comparisons
