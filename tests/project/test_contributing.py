"""The steps of docs/extending.md, taken in a copy of the project, pass the project's own tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")

# The files of its code blocks, in order.
FILES = {
    "python": (
        "callbacks/weight_norm.py",
        "tests/callbacks/test_weight_norm.py",
        "algorithms/gradient_centralization.py",
    ),
    "yaml": (
        "conf/callbacks/weight_norm.yaml",
        "conf/model/two_layers.yaml",
    ),
}
# Files that the page describes in words.
ALGORITHM = """# Centralizes gradients.
gradient_centralization:
  _target_: runner.algorithms.GradientCentralization
"""
MODEL = '''"""Two linear layers."""

from torch import Tensor, nn


class TwoLayers(nn.Module):
    """Two linear layers."""

    def __init__(self, in_features: int, width: int, num_classes: int) -> None:
        super().__init__()
        layers = nn.Linear(in_features, width), nn.ReLU(), nn.Linear(width, num_classes)
        self.layers = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the logits ``(N, C)``."""
        return self.layers(inputs)
'''


def copy_with_additions(folder: Path) -> None:
    """Copy the project, and add the files of the page."""
    for name in ("runner", "callbacks", "algorithms", "conf", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for language, files in FILES.items():
        blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        for file, content in zip(files, blocks, strict=True):
            assert Path(file).name in PAGE
            (folder / file).write_text(content)
    (folder / "conf/algorithms/gradient_centralization.yaml").write_text(ALGORITHM)
    (folder / "tests/algorithms/test_gradient_centralization.py").touch()
    (folder / "runner/models/two_layers.py").write_text(MODEL)
    exports, listed = folder / "runner/models/__init__.py", folder / "tests/models/test_configs.py"
    exports.write_text(exports.read_text() + "from runner.models.two_layers import TwoLayers\n")
    names = listed.read_text()
    assert '["mlp", ' in names
    listed.write_text(names.replace('["mlp", ', '["mlp", "two_layers", '))


def run_there(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run `python -m ARGUMENTS` with the packages of a folder, check its exit code, and return its output."""
    command = [sys.executable, "-m", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_steps_of_the_page_pass_the_tests_that_it_names(tmp_path: Path):
    copy_with_additions(tmp_path)
    tests = ["project/test_names.py", "project/test_layers.py", "callbacks/test_weight_norm.py"]
    tests += ["models/test_configs.py", "config/test_conf.py"]
    pytest_command = ("pytest", "-q", "-p", "no:cacheprovider")
    made = run_there(tmp_path, *pytest_command, "tests/project/test_names.py", "-k", "editors or documentation", code=1)
    assert made.count("was not current; it is now") >= 4
    name = "[`weight_norm`](reference/callbacks.md#runner.callbacks.WeightNorm)"
    row = f"| {name} | logs the norm of all weights after each epoch |"
    assert row in (tmp_path / "docs" / "callbacks.md").read_text().splitlines()
    for package, added in (("callbacks", "WeightNorm"), ("algorithms", "GradientCentralization")):
        assert f'    "{added}",\n' in (tmp_path / package / "__init__.pyi").read_text()
    new = "layers or editors or documentation or weight_norm or centralization or package or two_layers"
    files = [f"tests/{file}" for file in tests]
    passed = run_there(tmp_path, *pytest_command, "-k", new, *files)
    assert int(re.findall(r"(\d+) passed", passed)[-1]) > 60
    added = ("+callbacks=weight_norm", "callbacks.weight_norm.order=1", "+algorithms=gradient_centralization")
    shown = ("check", "model=two_layers", *added)
    assert "ok batch    float32 (4, 1, 8, 8), int64 (4,)" in run_there(tmp_path, "runner", *shown)
