"""Splits many similar cases between the two tiers, `make test` and `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast(cases: Iterable[Any], *names: Any) -> list[Any]:
    """Return cases for `parametrize`, of which only those named are part of the first tier.

    The others are marked `slow`. A case is a single value, or a tuple with a value for each argument of the test. Its
    name is the case itself or its first value; if that is a list of words, also these words with blanks between them.

    Raises:
        ValueError: a name is not that of exactly one case.
    """
    rows = [case if type(case) is tuple else (case,) for case in cases]
    known = [(row, row[0], " ".join(row[0]) if isinstance(row[0], list) else None) for row in rows]
    for name in names:
        if sum(name in called for called in known) != 1:
            raise ValueError(f"{name!r}: must be the name of one case")
    return [
        pytest.param(*row, marks=[] if any(name in called for name in names) else pytest.mark.slow)
        for row, called in zip(rows, known, strict=True)
    ]
