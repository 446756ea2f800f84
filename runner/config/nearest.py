"""The nearest of some allowed names, for messages about a name that is wrong. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def nearest(name: str, allowed: Iterable[Any]) -> str:
    """Return a phrase with the nearest allowed name, and with all allowed names unless there are too many."""
    names = sorted(one for one in map(str, allowed) if not one.startswith("_"))
    longer = [one for one in names if name and one.startswith(name)]
    swapped = [one for one in names if sorted(one) == sorted(str(name))]
    near = swapped or longer or difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if len(names) > 40:
        return f"did you mean {near[0]!r}?" if near else "it has many others"
    listed = ", ".join(names) or "none"
    return f"did you mean {near[0]!r}? Allowed: {listed}" if near else f"allowed: {listed}"
