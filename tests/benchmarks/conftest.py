"""The benchmarks as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from benchmark_modules import FOLDER, load


@pytest.fixture(scope="session")
def runs() -> Iterator[ModuleType]:
    """benchmarks/_runs.py, on a path that the processes it starts also search."""
    sys.path.append(str(FOLDER))
    yield importlib.import_module("_runs")
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="session")
def board(runs: ModuleType) -> ModuleType:
    """benchmarks/algorithms.py."""
    return load("benchmark_of_algorithms", "algorithms.py")


@pytest.fixture(scope="session")
def recipes(runs: ModuleType) -> ModuleType:
    """benchmarks/recipes.py."""
    return load("benchmark_of_recipes", "recipes.py")
