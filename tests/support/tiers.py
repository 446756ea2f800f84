"""Splits many similar cases between the two tiers, `make test` and `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize` in which only the first of every `number` is part of the first tier.

    The others are marked `slow`. A case is a single value, or a tuple with a value for each name.
    """
    given = [case if type(case) is tuple else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] if i % number else []) for i, case in enumerate(given)]
