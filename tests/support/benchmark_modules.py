"""Loads benchmarks as modules without adding their folder to the path, where `algorithms.py` would hide the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str, file: str) -> ModuleType:
    """Import a file of `benchmarks/` under this module name, and return the module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
