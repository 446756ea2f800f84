"""The benchmarks as modules; in their folder there is an `algorithms` that must not be taken for the package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def runs() -> Iterator[ModuleType]:
    """benchmarks/_runs.py, which processes that it starts find too."""
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
