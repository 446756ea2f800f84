"""The nearest of some allowed names, for messages about a name that is wrong. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def nearest(name: str, allowed: Iterable[Any], most: int = 40, otherwise: str = "it has many others") -> str:
    """Return a phrase with the nearest allowed name, and with all allowed names unless there are too many.

    Args:
        name: a name that is not allowed.
        allowed: the names that are.
        most: how many of them are listed at most.
        otherwise: what to say if there are more and none is near.
    """
    names = sorted(one for one in map(str, allowed) if not one.startswith("_"))
    longer = [one for one in names if name and one.startswith(name)]
    swapped = [one for one in names if sorted(one) == sorted(str(name))]
    near = swapped or longer or difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if len(names) > most:
        return f"did you mean {near[0]!r}?" if near else otherwise
    listed = ", ".join(names) or "none"
    return f"did you mean {near[0]!r}? Allowed: {listed}" if near else f"allowed: {listed}"
