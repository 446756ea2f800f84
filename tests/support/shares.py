"""Orders the tests for pytest-xdist's workers: long ones first, so that all workers end at about the same time."""

from __future__ import annotations

from itertools import groupby

import pytest

STARTERS = {"run_app", "run_ranks", "sessions", "mlflow_server", "empty_store"}
"""Fixtures that start processes; almost every test that takes seconds uses one of them."""


def deal(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order in which each worker gets whole files, those that start processes first.

    `--dist worksteal` gives each worker an equal part of this list; a worker without tests takes some from the end of
    another worker's part.
    """
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for starts_processes in (True, False):
        for tests in files:
            if any(STARTERS & {*getattr(test, "fixturenames", ())} for test in tests) == starts_processes:
                min(shares, key=len).extend(tests)
    return [test for share in shares for test in share]
