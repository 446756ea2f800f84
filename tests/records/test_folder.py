"""Folders of runs: each belongs to one run, and is removed if it stays empty."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kept_runs import write_manifest
from omegaconf import OmegaConf
from python_process import PATIENCE

from runner.cli.verbs import VERBS
from runner.failures.errors import WrongConfig
from runner.files.lock import lock_file
from runner.files.names import RESULT, SWEEP
from runner.records import folder as run_folder
from runner.records.folder import (
    LOCK,
    check_unused,
    checkpoints_in,
    latest_run,
    make_run_folder,
    owned,
    register_resolver,
    remove_unused,
    removed_when_refused,
    run_folder_of,
)
from runner.records.result import Result


def test_folders_made_in_one_second_differ_and_empty_ones_are_removed(tmp_path: Path):
    remove_unused()
    folders = [make_run_folder(str(tmp_path / "outputs")) for _ in range(5)]
    assert len({*folders}) == 5
    (Path(folders[2]) / "kept").touch()
    remove_unused()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [Path(folders[2]) / "kept"]
    assert not any(Path(path).exists() for path in folders if path != folders[2])


@pytest.mark.parametrize(
    ("verb", "is_in_place"), [("train", True), ("prove", True), ("check", False), ("explain", False)]
)
def test_verbs_that_leave_nothing_use_a_temporary_folder(
    verb: str, is_in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_folder, "_leaves_nothing", False)  # restored at the end of the test
    run_folder.use(VERBS[verb])
    register_resolver()
    config = OmegaConf.create({"dir": f"${{run_folder:{tmp_path / 'outputs'}}}"})
    folder = Path(config.dir)
    assert folder.is_dir() and folder.is_relative_to(tmp_path) == is_in_place
    remove_unused()
    assert not folder.exists() and list(tmp_path.iterdir()) == []


def test_a_run_refuses_a_folder_with_files_of_others(tmp_path: Path):
    check_unused(tmp_path / "none")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").touch()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(WrongConfig, match=r"hydra.run.dir=.*: has config.yaml, code, which no run wrote"):
        check_unused(tmp_path)
    (tmp_path / RESULT).write_text("broken")
    with pytest.raises(WrongConfig, match="has config.yaml, code"):
        check_unused(tmp_path)
    Result("FINISHED", "name", "0", []).write(tmp_path)
    check_unused(tmp_path)


def test_a_refused_run_removes_its_locked_folder(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = lock_file(folder / LOCK)
    assert lock is not None
    with pytest.raises(WrongConfig), lock, removed_when_refused(folder):
        raise WrongConfig("no")
    assert not folder.exists()


def test_a_second_process_cannot_train_in_the_same_folder(tmp_path: Path):
    holds = "import sys; from pathlib import Path; from runner.files.lock import lock_file; "
    holds += "file = lock_file(Path(sys.argv[1])); "
    other = subprocess.Popen(
        [sys.executable, "-c", holds + "print('held', flush=True); input()", str(tmp_path / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(WrongConfig, match="another process is training this run"), owned(tmp_path):
            pass
    finally:
        other.communicate("\n", timeout=PATIENCE)
    with owned(tmp_path), owned(tmp_path / "on a disk that takes no file"):
        pass


def test_the_working_directory_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongConfig), removed_when_refused(tmp_path):
        raise WrongConfig("no")
    assert tmp_path.is_dir()


def test_the_latest_run_is_the_one_that_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert latest_run() is None
    day, jobs, other = (
        Path("outputs/2026-01-01"),
        Path("outputs/sweeps/2026-01-02/10-00-00"),
        Path("outputs/of the API"),
    )
    write_manifest(jobs / "lr0.1", "ep1", 200)
    (jobs / SWEEP).write_text("{}")
    assert latest_run() == jobs / "lr0.1"
    write_manifest(day / "10-00-00", "ep1", 100)
    assert latest_run() == day / "10-00-00"  # a single run comes before a job of a sweep that saved later
    write_manifest(other, "ep1", 300)
    assert latest_run() == other
    write_manifest(day / "10-00-00", "ep2", 400)  # resumed
    assert latest_run() == day / "10-00-00"
    write_manifest(other, ".ep2.partial-7", 500)  # killed while saving
    (day / "11-00-00" / "checkpoints" / "ep1").mkdir(parents=True)  # torn
    write_manifest(Path("elsewhere"), "ep1", 600)
    assert latest_run() == day / "10-00-00"


@pytest.mark.parametrize("damage", ["loops", "torn", "a pipe", "a file"])
def test_a_broken_run_is_not_the_latest(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    day = Path("outputs/2026-01-01")
    write_manifest(day / "10-00-00", "ep1", 100)
    broken = day / "11-00-00" / "checkpoints"
    manifest = write_manifest(day / "11-00-00", "ep1", 200) / "manifest.json"
    if damage == "loops":
        shutil.rmtree(broken)
        broken.symlink_to("checkpoints")
    elif damage == "a file":
        shutil.rmtree(broken)
        broken.touch()
    else:
        manifest.unlink()
        os.mkfifo(manifest) if damage == "a pipe" else manifest.write_text("[" * 100_000)
        os.utime(manifest, (200, 200))
    assert latest_run() == day / "10-00-00"
    warning = (
        f"WARNING: {day}/11-00-00: not the latest run, because none of its checkpoints can be read; ep1: its manifest"
    )
    assert capsys.readouterr().err.count(warning) == (damage in ("torn", "a pipe"))


def test_checkpoints_are_found_at_any_depth_except_half_written_ones(tmp_path: Path):
    assert checkpoints_in(tmp_path) == []
    write_manifest(tmp_path, ".ep1.partial-7", 1)
    assert checkpoints_in(tmp_path) == []
    whole, deep = write_manifest(tmp_path, "ep1", 1), write_manifest(tmp_path / "deep", "ep9", 1)
    (tmp_path / "checkpoints" / "latest").symlink_to("ep1")
    (tmp_path / "checkpoints" / "torn").mkdir()
    put_aside = write_manifest(tmp_path, ".ep2.discarded-7", 1)
    assert {*checkpoints_in(tmp_path)} == {whole, deep, put_aside, tmp_path / "checkpoints" / "torn"}


def test_a_copied_checkpoint_has_no_run_folder(tmp_path: Path):
    inside = write_manifest(tmp_path / "run", "ep1", 1)
    assert run_folder_of(str(inside)) == run_folder_of(str(tmp_path / "run")) == tmp_path / "run"
    inside.rename(tmp_path / "copied")
    assert run_folder_of(str(tmp_path / "copied")) is None


@pytest.mark.parametrize("torn", ["", '{"a": "', "[]", '{"a": 7}'])
def test_a_torn_list_of_sweeps_is_made_again(torn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folders = {identity: run_folder.remembered_folder("sweeps", identity, renew=False) for identity in "ab"}
    for identity, folder in folders.items():
        (Path(folder) / run_folder.SWEEP).write_text(json.dumps({"identity": identity}))
    (tmp_path / "sweeps" / run_folder.INDEX).write_text(torn)
    again = {identity: run_folder.remembered_folder("sweeps", identity, renew=False) for identity in "ab"}
    if torn != '{"a": 7}':  # intact, but the sweep does not exist
        assert again == folders
    run_folder.remove_unused()
