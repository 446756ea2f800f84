"""Fixtures for the tests of callbacks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # for imports of helper modules


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test, with an empty MLflow store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    shutil.copy(empty_store, tmp_path / "outputs" / "mlflow.db")
    return tmp_path
