"""A run records the uncommitted modules that its targets import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kept_runs import git

from runner.records import uncommitted
from runner.records.uncommitted import loose_modules

Import = Callable[..., None]


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Import:
    """Import modules from an extra folder, for one test."""

    def run(folder: Path, *names: str) -> None:
        monkeypatch.syspath_prepend(folder)
        before = {*sys.modules}
        for name in names:
            importlib.import_module(name)
        for name in {*sys.modules} - before:
            monkeypatch.delitem(sys.modules, name)  # restored at the end of the test
            importlib.import_module(name)

    return run


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def config(*targets: str) -> dict[str, Any]:
    return {"callbacks": {str(index): {"_target_": target} for index, target in enumerate(targets)}}


def test_an_untracked_module_is_recorded_with_its_imports(repository: Path, imports: Import):
    """The imports include those inside functions; a changed module counts as uncommitted."""
    write(repository, loose="import json, yaml\nfrom beside import x\ndef f():\n    import later\n", beside="x = 1")
    write(repository, later="", changed="a = 1", committed="", stranger="")
    git(repository, "add", "changed.py", "committed.py")
    git(repository, "commit", "-qm", "second")
    write(repository, changed="import broken", broken="not python")
    (repository / "changed.py").write_text("a = 2")
    imports(repository, "loose", "changed", "committed", "stranger")
    kept = loose_modules(config("loose.Model", "changed.F", "committed.G", "torch.nn.Linear", "nowhere.X"))
    assert {*kept} == {"loose.py", "beside.py", "later.py", "changed.py"}
    assert kept["changed.py"] == b"a = 2"
    through_hydra = {"model": {"_target_": "hydra.utils.get_class", "path": "stranger.Model"}, "note": "later.py"}
    assert {*loose_modules(through_hydra)} == {"stranger.py"}


def test_a_package_with_an_untracked_file_is_recorded_whole(repository: Path, imports: Import):
    write(repository, parts__in____init__="", parts__in__layers="", parts__in__deep="", whole__in____init__="")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    imports(repository, "parts.layers", "whole")
    both = config("parts.layers.Layer", "whole.Model")
    assert loose_modules(both) == {}
    write(repository, parts__in__new="import whole")
    assert {*loose_modules(both)} == {f"parts/{name}.py" for name in ("__init__", "layers", "deep", "new")}


@pytest.mark.parametrize("commits", [False, True])
def test_without_a_commit_all_modules_of_the_user_are_recorded(
    commits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: Import
):
    if commits:
        git(tmp_path, "init", "-q")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space").mkdir()
    write(tmp_path, space__in__mine="x = 1")
    (tmp_path / "space" / "site-packages").mkdir()
    (tmp_path / "space" / "site-packages" / "big.py").write_text("")
    imports(tmp_path, "space.mine")
    kept = loose_modules(config("space.mine.Model", "runner.ClassificationModel"))
    assert [name for name in kept if not name.startswith("runner/")] == ["space/mine.py"]


def test_files_over_the_limit_are_left_out_and_named(
    repository: Path, imports: Import, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(uncommitted, "LIMIT", 100)
    write(repository, small="import large, tiny", large="x" * 100 + " = 1", tiny="")
    imports(repository, "small", "large", "tiny")
    assert {*loose_modules(config("small.Model"))} == {"small.py", "tiny.py"}
    assert f"commit the files that are left out: {repository / 'large.py'}" in caplog.text
