"""Divides the cases of a parametrized test between the two tiers, `make test` and `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast(cases: Iterable[Any], *names: Any) -> list[Any]:
    """Return the cases for `parametrize`, and mark those that are not in `names` as `slow`.

    A case is a single value, or a tuple with a value for each argument of the test. Its name is the case itself, or the
    first value of the tuple. A list of words can also be named by one string, with spaces between the words.

    Raises:
        ValueError: a name does not match exactly one case.
    """
    rows = [case if type(case) is tuple else (case,) for case in cases]
    names_of_rows = [(row, row[0], " ".join(row[0]) if isinstance(row[0], list) else None) for row in rows]
    for name in names:
        if sum(name in names_of_row for names_of_row in names_of_rows) != 1:
            raise ValueError(f"{name!r}: must be the name of exactly one case")
    return [
        pytest.param(*row, marks=[] if any(name in names_of_row for name in names) else pytest.mark.slow)
        for row, names_of_row in zip(rows, names_of_rows, strict=True)
    ]
