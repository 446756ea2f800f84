"""The table of modes: its rows fit the config, the README and the functions that they name."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

from runner.cli.verbs import MODE_KEYS, MODES, Mode, find_mode
from runner.records.job import Job

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = (ROOT / "conf" / "config.yaml").read_text(encoding="utf-8")
JOB = Job(config={}, run_dir="", run_name="run")


@pytest.mark.parametrize("mode", MODES.values(), ids=str)
def test_a_mode_runs_a_documented_function(mode: Mode):
    """Each is in a file of `runner/verbs/`, which its tests mirror."""
    function = resolve_name(mode.runs)
    assert [*inspect.signature(function).parameters] == ["job" if mode.composes else "typed"] and function.__doc__
    module = mode.runs.partition(":")[0]
    assert module.startswith("runner.verbs.")
    if mode.check is not None:
        assert [*inspect.signature(resolve_name(mode.check)).parameters] == ["config"]


@pytest.mark.parametrize("mode", MODES.values(), ids=str)
def test_the_config_has_the_keys_of_a_mode(mode: Mode):
    values = yaml.safe_load(CONFIG)
    if not mode.composes:
        assert mode.name not in values
        return
    assert (mode.name in values) == (mode.name in MODE_KEYS) == bool(mode.keys or mode.has_value)
    if mode.keys:
        assert [*values[mode.name]] == [*mode.keys]
    for key, allowed in mode.keys.items():
        value = values[mode.name][key]
        assert type(value) is allowed if isinstance(allowed, type) else value in allowed


def test_the_config_and_the_documentation_name_all_modes():
    (comment,) = re.findall(r"^mode: train (# .*\n# .*\n)", CONFIG, re.MULTILINE)
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(document.read_text(encoding="utf-8") for document in documents)
    for name in MODES:
        assert re.search(rf"\b{name}\b", comment)
        assert name == "train" or f"mode={name}" in text or f"runner {name}" in text


def test_a_mode_that_leaves_a_run_runs_where_one_is_recorded():
    for mode in MODES.values():
        assert not (mode.trains and mode.uses_weights)
        assert mode.keeps_folder or not (mode.trains or mode.uses_weights)
        trains_here = mode.keeps_folder or mode.name in ("lr_range", "replay", "verify")  # three that keep nothing
        assert mode.on_all_ranks == trains_here


def test_a_mode_runs_its_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "own_mode.py").write_text(
        "def double(job): return 2.0 * len(job.run_name)\n"
        "def refuse(config): raise ValueError(f'seed={config[\"seed\"]}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mode = Mode("double", "doubles", "runner mode=double", runs="own_mode:double", check="own_mode:refuse")
    assert mode.run(JOB) == 6.0
    with pytest.raises(ValueError, match="seed=3"):
        mode.check_config({"seed": 3})
    Mode("double", "doubles", "runner mode=double", runs="own_mode:double").check_config({"seed": 3})


@pytest.mark.parametrize("name", ["chek", "", None, 3, ["check"], {"ch": 1}])
def test_an_unknown_mode_is_one_error_with_the_nearest_name(name: object):
    with pytest.raises(ValueError, match="no such mode; .*llowed: check, compare, completion, ") as raised:
        find_mode(name)
    assert str(raised.value).startswith(f"mode={name!r}: ")
    assert ("did you mean 'check'" in str(raised.value)) == (name in ("chek", ["check"]))


def test_the_table_imports_no_mode_and_no_torch():
    program = (
        "import sys, runner.cli.verbs; print([name for name in sys.modules if 'torch' in name or 'modes' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_mode_that_contributing_shows_runs(tmp_path: Path):
    row, content = re.findall(r"```py\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    for package in ("runner", "callbacks", "algorithms", "conf"):
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True)
    (tmp_path / "runner" / "verbs" / "parameters.py").write_text(content)
    table = tmp_path / "runner" / "cli" / "rows.py"
    table.write_text(table.read_text().replace("_ROWS = (\n", f"_ROWS = (\n    {row.strip()},\n"))
    done = subprocess.run(
        [sys.executable, "-m", "runner", "mode=parameters", "model=mlp", "callbacks=none"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    parameters = (64 + 1) * 128 + (128 + 1) * 128 + (128 + 1) * 10
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["model=mlp", "callbacks=none"],
        ["parameters", f"{parameters:,}"],
    ]
    assert not (tmp_path / "outputs").exists()
