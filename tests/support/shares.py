"""The order in which pytest-xdist's workers take the tests: long ones first, so that all workers end together."""

from __future__ import annotations

from itertools import groupby

import pytest

STARTERS = {"run_app", "run_ranks", "sessions", "mlflow_server", "empty_store"}
"""Fixtures that start processes: a test that takes seconds uses one of them."""


def deal(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests, file by file, in one share for each worker, which begins with files that start processes.

    `--dist worksteal` gives each worker an equal part of this list; one that runs out takes from the ends of others.
    """
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for starts in (True, False):
        for tests in files:
            if any(STARTERS & {*getattr(test, "fixturenames", ())} for test in tests) == starts:
                min(shares, key=len).extend(tests)
    return [test for share in shares for test in share]
