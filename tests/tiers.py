"""Which of many similar tests the first tier runs: `make test` against `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`, of which the first of every `number` is the first tier's, and the others are `slow`.

    Cases are single values, or tuples of as many as there are names.
    """
    given = [case if type(case) is tuple else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] if i % number else []) for i, case in enumerate(given)]
