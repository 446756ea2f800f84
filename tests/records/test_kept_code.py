"""A run records its uncommitted modules; rerun and resume import the recorded ones if they have changed since."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_runs import QUIET, SHORT, git

from runner.records.kept_code import code_to_import, import_from, read_code, write_code
from runner.records.record import Record

MODEL = """
from torch import nn
from widths import WIDTH

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
"""
COMMAND = (*SHORT, *QUIET, "~model.module", "+model.module._target_=own.Net", "trainer.max_duration=1ba")


@pytest.fixture
def project(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a model that git does not track."""
    (repository / "own.py").write_text(MODEL)
    (repository / "widths.py").write_text("WIDTH = 7\n")
    (repository / ".gitignore").write_text("run*\noutputs\n")
    git(repository, "add", ".gitignore")
    git(repository, "commit", "-qm", "second")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield repository
    for name in ("own", "widths"):
        sys.modules.pop(name, None)


def test_a_rerun_uses_the_recorded_modules_but_none_that_were_tampered_with(project: Path, run_here: Any):
    run_here(*COMMAND, "hydra.run.dir=run", code=0)
    assert {*read_code(project / "run")} >= {"own.py", "widths.py"} and Record(project / "run").is_own
    (project / "own.py").unlink()
    (project / "widths.py").write_text("WIDTH = 9\n")
    for name in ("own", "widths"):
        del sys.modules[name]
    again = run_here("rerun", "run", "hydra.run.dir=run2", code=0)
    assert "own.py: not found here; the recorded version is used: run/code" in again.err
    assert "widths.py: changed since the run was made; the recorded version is used: run/code" in again.err
    assert read_code(project / "run2") == read_code(project / "run")
    first, second = ((project / run / "checkpoints/ep0-ba1/model.pt").read_bytes() for run in ("run", "run2"))
    assert first == second

    # Modules that somebody else wrote or changed are never imported.
    (project / "run" / "code" / "own.py").write_text("import os; os.mkdir('imported')")
    sys.path.remove(next(entry for entry in sys.path if "runner-code-" in entry))
    del sys.modules["own"]
    refused = run_here("rerun", "run", "--allow-targets=own.Net", "hydra.run.dir=run3", code=2)
    assert "the recorded version is not used: run/code" in refused.err and "there is no module 'own'" in refused.err
    assert not (project / "imported").exists()


def test_a_copied_run_resumes_with_its_recorded_modules(project: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch):
    run_here(*COMMAND, "hydra.run.dir=run", code=0)
    (project / "elsewhere").mkdir()
    shutil.copytree(project / "run", project / "elsewhere" / "copy", symlinks=True)
    for name in ("own.py", "widths.py"):
        (project / name).unlink()
    for name in ("own", "widths"):
        del sys.modules[name]
    monkeypatch.chdir(project / "elsewhere")
    refused = run_here("resume", "copy", code=2)
    assert "own.py, widths.py: not found here; the recorded version is used: copy/code" in refused.err
    assert "this run has finished" in refused.err
    run_here("resume", "copy", "trainer.max_duration=2ba", code=0)


@pytest.mark.slow
def test_all_ranks_and_jobs_of_a_sweep_import_the_recorded_modules(project: Path, run_app: Any):
    run_app(*COMMAND, "hydra.run.dir=run", "trainer.deterministic=true")
    (project / "own.py").unlink()
    (project / "widths.py").write_text("WIDTH = 9\n")
    run_app("rerun", "run", "launch.nproc_per_node=2", "hydra.run.dir=run2")
    joblib = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=runs")
    run_app("-m", "rerun", "run", "seed=0,1", *joblib)
    for run in (project / "run2", *(path.parent for path in project.glob("runs/*/config.yaml"))):
        assert read_code(run)["widths.py"] == b"WIDTH = 7\n", run
    assert len([*project.glob("runs/*/code")]) == 2


def test_only_changed_modules_are_imported_from_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept_here.py").write_text("x = 1")
    write_code(tmp_path / "run", {"kept_here.py": b"x = 1", "runner/timing/time.py": b"not as now"})
    before = [*sys.path]
    assert code_to_import(tmp_path / "run", again=True, may_run=True) == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("INFO: runner/timing/time.py: changed since the run was made") and "is not used" in line
    (tmp_path / "kept_here.py").write_text("x = 2")
    for again, is_own_run in ((False, True), (True, False)):
        assert code_to_import(tmp_path / "run", again, is_own_run) == {}
        assert "kept_here.py, runner/timing/time.py: changed since the run was made" in capsys.readouterr().err
    assert sys.path == before
    code = code_to_import(tmp_path / "run", again=True, may_run=True)
    assert importlib.import_module("kept_here").x == 2
    for _ in range(2):  # the second time it exists
        import_from(code)
        assert importlib.import_module("kept_here").x == 1
    assert len(sys.path) == len(before) + 1 and sys.path[0] != str(tmp_path / "run" / "code")
    del sys.modules["kept_here"]


def test_recorded_code_leaves_out_caches_and_follows_no_links(tmp_path: Path):
    write_code(tmp_path, {"a.py": b"x = 1"})
    (tmp_path / "code" / "__pycache__").mkdir()
    (tmp_path / "code" / "__pycache__" / "a.pyc").write_text("cached")
    assert read_code(tmp_path) == {"a.py": b"x = 1"}
    os.symlink("/etc", tmp_path / "code" / "json")
    assert read_code(tmp_path) == {"a.py": b"x = 1", "json": b"/etc"}
    os.rename(tmp_path / "code", tmp_path / "elsewhere")
    os.symlink("elsewhere", tmp_path / "code")
    assert read_code(tmp_path) == {".": b"elsewhere"}
