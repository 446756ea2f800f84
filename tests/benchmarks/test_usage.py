"""The --help of each benchmark prints its usage without measuring anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_modules import FOLDER
from python_process import run_python


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(FOLDER.glob("[a-z]*.py")), ids=lambda file: file.stem)
def test_help_prints_usage_and_ends(file: Path, tmp_path: Path):
    finished = run_python([str(file), "--help"], cwd=tmp_path, check=True)
    assert finished.stdout.startswith(f"usage: {file.name} ") and f"python benchmarks/{file.name}" in finished.stdout


def test_sizes_replaces_only_declared_dependencies(tmp_path: Path):
    finished = run_python([str(FOLDER / "sizes.py"), "--replace", "mlflo", "mlflow-skinny"], cwd=tmp_path)
    assert finished.returncode == 2 and "--replace mlflo: pyproject.toml has no such dependency" in finished.stderr
