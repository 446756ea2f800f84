"""Modules of the working directory are imported only for targets, and never in place of libraries."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.libraries.targets import find_in_working_directory

SHADOWS = ("yaml", "pynvml", "colorama", "simplejson", "psutil", "rich", "omegaconf", "hydra", "torch", "mlflow")
READING = ("runs", "list callbacks", "help ema", "--cfg job", "compare none other", "check")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory whose modules write a file when they are imported."""
    mark = "open('ran', 'a').write(__name__)\n"
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(mark)
    (tmp_path / "hydra_plugins" / "own").mkdir(parents=True)
    for folder in ("hydra_plugins", "hydra_plugins/own"):
        (tmp_path / folder / "__init__.py").write_text(mark)
    return tmp_path


@pytest.mark.parametrize("command", READING)
def test_a_command_without_targets_imports_nothing_from_the_working_directory(
    command: str, hostile: Path, run_app: Any
):
    run_app(*command.split(), exit_code=None)
    assert not (hostile / "ran").exists()


def test_modules_of_the_user_are_imported_and_replace_no_library(hostile: Path, run_app: Any):
    (hostile / "own.py").write_text(
        "from runner import ClassificationModel\nfrom runner.models import MLP\nimport helper\n"
        "def make():\n    return ClassificationModel(MLP(64, [4], 10), num_classes=10)\n"
    )
    (hostile / "helper.py").touch()
    run_app("check", "model=mlp", "model._target_=own.make", "~model.module", "~model.num_classes")
    assert not (hostile / "ran").exists()


def test_the_working_directory_is_searched_last_and_only_if_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    before = [*sys.path]
    (tmp_path / "own_17.py").touch()
    (tmp_path / "torch.py").touch()
    find_in_working_directory({"a": {"_target_": "torch.nn.Linear", "b": ["none.There", "own_17", "/own_17.x"]}})
    assert sys.path == before
    find_in_working_directory({"a": ["x", {"path": "own_17.Model"}]})
    assert sys.path == [*before, os.getcwd()]
