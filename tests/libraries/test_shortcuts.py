"""Without the shortcuts around other libraries, results are the same and only slower."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner.libraries.shortcuts import NAMES, is_enabled

ROOT = Path(__file__).resolve().parents[2]
CORE_TESTS = (
    *("core/test_engine.py", "core/test_engine_errors.py", "training/test_loop.py", "training/test_loop_batch.py"),
    *("training/test_loop_evaluation.py", "training/test_accumulation.py", "training/test_trainer.py"),
    *("program/test_main.py", "checkpoints/test_snapshot.py", "optim/test_steps.py"),
)


@pytest.mark.parametrize(
    ("value", "enabled"),
    [
        ("", NAMES),
        ("0", NAMES),
        ("1", ()),
        ("true", ()),
        ("backward,bakward", ()),
        ("backward,exit", tuple(name for name in NAMES if name not in ("backward", "exit"))),
    ],
)
def test_the_variable_disables_all_or_some_shortcuts(
    value: str, enabled: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RUNNER_PUBLIC_ONLY", value)
    assert tuple(filter(is_enabled, NAMES)) == enabled


def test_the_table_lists_all_shortcuts():
    section = (ROOT / "docs" / "private_names.md").read_text().partition("\n## Shortcuts\n")[2].partition("\n## ")[0]
    assert [row.split("`")[1] for row in section.splitlines() if row.startswith("| `")] == list(NAMES)


@pytest.mark.slow
def test_weights_are_equal_to_the_bit_without_shortcuts(tmp_path: Path):
    weights = []
    for value in ("0", "1"):
        folder = tmp_path / value
        command = [sys.executable, "-m", "runner", "trainer.max_duration=12ba", f"hydra.run.dir={folder}"]
        env = os.environ | {"RUNNER_PUBLIC_ONLY": value}
        subprocess.run([*command, "~callbacks.mlflow_logger"], cwd=tmp_path, env=env, check=True)
        weights.append(torch.load(folder / "checkpoints/latest/model.pt", weights_only=True))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_core_passes_its_tests_without_shortcuts():
    # Without its shortcut, torchmetrics imports transformers, which must not happen before tests fork processes.
    public = ",".join(name for name in NAMES if name != "torchmetrics")
    files = [str(ROOT / "tests" / name) for name in CORE_TESTS]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files],
        cwd=ROOT,
        env=env | {"RUNNER_PUBLIC_ONLY": public},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
