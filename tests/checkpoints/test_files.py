"""Checkpoint files: written atomically, on full disks and by killed processes too, and checked when they are read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limited_files import limited_files
from manifests import seal
from python_process import run_python, start_python

from runner.checkpoints.files import find_checkpoint, is_complete, read_config, read_file, verify
from runner.checkpoints.weights import read_weights
from runner.checkpoints.writing import write_checkpoint
from runner.timing.time import Timestamp

MEGABYTE = 1 << 20
TIME = Timestamp(batch=7).state_dict()


def snapshot(megabytes: float = 0.01, value: float = 1.0) -> dict[str, Any]:
    weights = {"weight": torch.full((int(megabytes * MEGABYTE / 4),), value)}
    time = Timestamp(batch=int(value)).state_dict()
    return {"timestamp": time, "model.pt": weights, "state.pt": state(seed=1, weights=weights)}


def state(**more: Any) -> dict[str, Any]:
    """Return a state with all required entries, and further ones."""
    metrics = ("train_metrics", "train_metric_values", "eval_metric_values", "evaluated_at")
    empty = {name: {} for name in ("algorithms", "callbacks", *metrics, "order")}
    return {"timestamp": TIME, "model": None, "optimizers": [], "schedulers": [], "scaler": None, **empty, **more}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_manifest_that_names_files_outside_its_folder_is_refused(tmp_path: Path):
    write_checkpoint(snapshot(), tmp_path / "ba1")
    text = (tmp_path / "ba1" / "manifest.json").read_text()
    (tmp_path / "ba1" / "link").symlink_to("/dev/zero")  # reading it never ends
    for name in ("/dev/zero", "../ba1/model.pt", "link", ".."):
        manifest = json.loads(text)
        manifest["files"][name] = {"size": 0, "sha256": ""}
        (tmp_path / "ba1" / "manifest.json").write_text(json.dumps(manifest))
        assert verify(tmp_path / "ba1") == f"its manifest names {name!r}, which is not a file in its folder"


def value_of(path: Path) -> float:
    return float(read_file(path, "model.pt")["weight"][0])


def test_the_config_is_saved_beside_the_weights_and_verified(tmp_path: Path):
    config = {"seed": 0, "optimizer": {"lr": 0.1, "betas": [0.9, float("inf")]}, "path": Path("here"), "none": None}
    write_checkpoint({"timestamp": TIME, "config.json": config, "model.pt": {}}, tmp_path / "ba1")
    assert read_config(tmp_path / "ba1") == config | {"path": "here"}
    text = (tmp_path / "ba1" / "config.json").read_text()
    (tmp_path / "ba1" / "config.json").write_text(text.replace("0.1", "0.2"))
    assert "config.json was modified" in (verify(tmp_path / "ba1") or "")
    write_checkpoint({"timestamp": TIME, "model.pt": {}}, tmp_path / "ba2")
    assert read_config(tmp_path / "ba2") is None


def test_the_newest_checkpoint_is_the_last_written_whatever_the_times_of_its_files(tmp_path: Path):
    for batch in (9, 3, 6):
        write_checkpoint(snapshot(value=batch), tmp_path / f"ba{batch}")
    for age, batch in enumerate((9, 3, 6)):
        os.utime(tmp_path / f"ba{batch}" / "manifest.json", (1e9 - age, 1e9 - age))
    assert find_checkpoint(tmp_path).name == "ba6"


def test_a_written_checkpoint_is_read_back_unchanged(tmp_path: Path):
    content = {
        **state(),
        "tensors": [torch.arange(3), {"x": torch.tensor(2.5, dtype=torch.bfloat16)}],
        "n": 3,
        "s": "ä",
        "none": None,
    }
    write_checkpoint({"timestamp": TIME, "model.pt": {}, "state.pt": content}, tmp_path / "a" / "b" / "ba1")
    path = tmp_path / "a" / "b" / "ba1"
    loaded = read_file(path, "state.pt")
    torch.testing.assert_close(loaded["tensors"], content["tensors"], rtol=0, atol=0)
    assert {key: loaded[key] for key in ("n", "s", "none")} == {"n": 3, "s": "ä", "none": None}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["timestamp"] == TIME and manifest["files"]["state.pt"]["size"] > 0
    assert is_complete(path) and names(path.parent) == {"ba1"}


def test_ranks_without_a_snapshot_write_nothing(tmp_path: Path):
    write_checkpoint(None, tmp_path / "none")
    assert not names(tmp_path)


def test_an_existing_checkpoint_is_replaced(tmp_path: Path):
    for value in (1.0, 2.0, 3.0):
        write_checkpoint(snapshot(value=value), tmp_path / "ba1")
        assert value_of(tmp_path / "ba1") == value and names(tmp_path) == {"ba1"}


def test_a_file_or_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "table.csv").write_text("1")
    (tmp_path / "notes").write_text("2")
    for name in ("results", "notes"):
        with pytest.raises(FileExistsError, match="is not a checkpoint"):
            write_checkpoint(snapshot(), tmp_path / name)
    assert names(tmp_path) == {"results", "notes"} and (tmp_path / "results" / "table.csv").read_text() == "1"


@contextlib.contextmanager
def small_files(folder: Path) -> Iterator[Path]:
    """Limit the files of this process to one megabyte."""
    with limited_files(MEGABYTE):
        yield folder


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of one megabyte on a folder; limit the files of this process if that is not allowed."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTE}", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        with small_files(folder):
            yield folder
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("limit", [small_disk, small_files])
def test_a_full_disk_leaves_no_new_checkpoint_and_keeps_the_old_one(limit: Any, tmp_path: Path):
    with limit(tmp_path) as folder:
        write_checkpoint(snapshot(0.1, value=1.0), folder / "old")
        for name in ("old", "new"):
            with pytest.raises(OSError) as caught:
                write_checkpoint(snapshot(5, value=2.0), folder / name)
            assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
            assert names(folder) == {"old"} and value_of(folder / "old") == 1.0
        write_checkpoint(snapshot(0.1, value=3.0), folder / "old")
        assert value_of(folder / "old") == 3.0


def test_a_file_in_the_place_of_a_folder_is_an_os_error(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "ba1", tmp_path / "file" / "a" / "ba1"):
        with pytest.raises(OSError):
            write_checkpoint(snapshot(), path)
    assert names(tmp_path) == {"file"} and (tmp_path / "file").read_text() == "mine"


def test_a_read_only_folder_is_an_os_error():
    folder = Path(tempfile.mkdtemp())  # not in tmp_path, whose parents only the owner can enter
    folder.chmod(0o555)
    as_root = os.geteuid() == 0
    try:
        if as_root:
            os.seteuid(65534)  # root may write to read-only folders
        with pytest.raises(PermissionError):
            write_checkpoint(snapshot(), folder / "ba1")
    finally:
        if as_root:
            os.seteuid(0)
        files = names(folder)
        folder.rmdir()
    assert not files


def test_an_object_that_cannot_be_saved_leaves_no_files(tmp_path: Path):
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        write_checkpoint({"timestamp": TIME, "state.pt": {"function": lambda: None}}, tmp_path / "ba1")
    assert not names(tmp_path)


def test_files_are_synced_before_the_checkpoint_is_renamed_and_its_folder_afterwards(tmp_path: Path, monkeypatch):
    """A test cannot cut the power, so it checks the calls of fsync and rename."""
    calls: list[str] = []
    sync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def record_rename(source: Any, target: Any) -> None:
        calls.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    write_checkpoint(snapshot(), tmp_path / "checkpoints" / "ep1")
    partial = f".ep1.partial-{os.getpid()}"
    assert calls == ["model.pt", "state.pt", "manifest.json", partial, "rename to ep1", "checkpoints"]


def test_a_kill_while_writing_leaves_complete_checkpoints_and_hidden_folders(tmp_path: Path):
    program = f"""
import runpy, sys
sys.path.append({str(Path(__file__).parents[1] / "support")!r})
file = runpy.run_path({__file__!r})
print("ready", flush=True)
for number in range(1000000):
    file["write_checkpoint"](file["snapshot"](4, value=float(number)), "ba1" if number % 2 else f"ba{{number % 8}}")
    print(number, flush=True)
"""
    for delay in (0.0, 0.01, 0.02, 0.05, 0.09, 0.13):
        folder = tmp_path / str(delay)
        folder.mkdir()
        with start_python(["-c", program], cwd=folder, stdout=subprocess.PIPE, forks=False) as process:
            try:
                assert process.stdout is not None
                for _ in range(4):  # ready, and three checkpoints
                    assert process.stdout.readline()
                time.sleep(delay)
            finally:
                process.kill()
        everything = names(folder)
        visible = {name for name in everything if not name.startswith(".")}
        # Between the two renames of a replacement, both checkpoints have hidden names.
        assert len(visible) >= 2 and all(is_complete(folder / name) for name in visible), everything
        assert all(".partial-" in name or ".discarded-" in name for name in everything - visible)
        assert value_of(find_checkpoint(folder)) >= 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "checkpoints" / "ep1"
    write_checkpoint(snapshot(), path)
    return path


def test_a_truncated_file_is_refused(checkpoint: Path):
    for name in ("model.pt", "state.pt"):
        data = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(data[: len(data) // 2])
        assert verify(checkpoint) == f"the size of {name} differs from its manifest"
        with pytest.raises(ValueError, match="cannot be used: the size of "):
            find_checkpoint(checkpoint)
        (checkpoint / name).write_bytes(data)
    assert verify(checkpoint) is None


def test_a_file_with_a_flipped_bit_is_refused(checkpoint: Path):
    for name in ("model.pt", "state.pt"):
        data = bytearray((checkpoint / name).read_bytes())
        for position in (0, len(data) // 3, len(data) // 2, len(data) - 1):
            data[position] ^= 1
            (checkpoint / name).write_bytes(data)
            assert verify(checkpoint) == f"{name} was modified: its SHA-256 differs from its manifest"
            data[position] ^= 1
        (checkpoint / name).write_bytes(data)
    assert is_complete(checkpoint)


@pytest.mark.parametrize(
    "manifest", ["", "{", "[]", "null", '{"files": 3}', '{"files": {}}', '{"files": {"model.pt": {}}}', '{"format": 1}']
)
def test_a_manifest_without_its_entries_is_refused(manifest: str, checkpoint: Path):
    (checkpoint / "manifest.json").write_text(manifest)
    assert "its manifest cannot be read" in (verify(checkpoint) or "")
    with pytest.raises(ValueError, match="cannot be used: its manifest cannot be read"):
        find_checkpoint(checkpoint)


def test_missing_files_are_named(checkpoint: Path):
    (checkpoint / "state.pt").unlink()
    assert verify(checkpoint) == "state.pt is missing"
    (checkpoint / "manifest.json").unlink()
    assert verify(checkpoint) == "manifest.json is missing"


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["zip", "plain"])
def test_a_malicious_pickle_is_refused_and_not_run(form: str, checkpoint: Path, tmp_path: Path):
    trap = tmp_path / "sprung"
    if form == "zip":
        torch.save({"weight": Evil(trap)}, checkpoint / "model.pt")
    else:
        (checkpoint / "model.pt").write_bytes(pickle.dumps({"weight": Evil(trap)}, protocol=2))
    seal(checkpoint / "model.pt")
    assert verify(checkpoint) is not None  # although its manifest matches
    reasons = {"zip": "would have to be unpickled, which could run code, so it is rejected", "plain": "not a zip file"}
    with pytest.raises(ValueError, match=reasons[form]):
        read_file(checkpoint, "model.pt")
    assert not trap.exists()
    pickle.loads(pickle.dumps(Evil(trap)))
    assert trap.exists()  # the trap works


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 not a zip"])
def test_a_file_of_another_format_is_an_error_that_names_it(content: bytes, checkpoint: Path):
    (checkpoint / "model.pt").write_bytes(content)
    seal(checkpoint / "model.pt")
    with pytest.raises(ValueError, match="model.pt"):
        read_file(checkpoint, "model.pt")


def test_the_error_for_a_file_of_old_torch_has_the_command_that_converts_it(tmp_path: Path):
    old = tmp_path / "old weights.pth"
    torch.save({"weight": torch.arange(3)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="has the format of torch before 1.6; convert it: python -c") as caught:
        read_weights(old, torch.nn.Identity())
    command = shlex.split(str(caught.value).partition("convert it: ")[2])
    run_python(command[1:], cwd=tmp_path, check=True)
    assert torch.equal(read_weights(tmp_path / "new.pth", torch.nn.Identity())["weight"], torch.arange(3))


def test_torch_can_read_the_files_without_this_project(checkpoint: Path):
    assert zipfile.is_zipfile(checkpoint / "model.pt")
    assert set(torch.load(checkpoint / "model.pt", weights_only=True)) == {"weight"}


def test_the_newest_complete_checkpoint_of_a_run_is_found(checkpoint: Path, caplog):
    folder = checkpoint.parent
    for number in (2, 3):
        write_checkpoint(snapshot(value=float(number)), folder / f"ep{number}")
        os.utime(folder / f"ep{number}" / "manifest.json", ns=(0, time.time_ns() + number * 10**9))
    (folder / "latest").symlink_to("ep3", target_is_directory=True)
    for path in (folder, folder.parent, folder / "latest", folder / "ep3"):
        assert find_checkpoint(path) == (folder / "ep3").resolve()
    (folder / "ep3" / "model.pt").write_bytes(b"truncated")
    for path in (folder, folder.parent):
        assert find_checkpoint(path) == (folder / "ep2").resolve()
    assert "ep3 is not used: the size of model.pt differs" in caplog.text


def test_a_checkpoint_that_is_removed_during_the_search_is_passed_over(tmp_path: Path, monkeypatch: Any):
    for number in (1, 2):
        write_checkpoint(snapshot(value=number), tmp_path / f"ba{number}")

    def saved_at(path: Path) -> int:  # the run that trains removes the newest, and has not written the next
        shutil.rmtree(tmp_path / "ba2", ignore_errors=True)
        return int(path.name.removeprefix("ba"))

    monkeypatch.setattr("runner.checkpoints.files.saved_at", saved_at)
    assert find_checkpoint(tmp_path).name == "ba1"


def test_a_folder_without_a_complete_checkpoint_is_an_error(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="no complete checkpoint there"):
            find_checkpoint(path)


def test_a_checkpoint_that_was_being_replaced_during_a_kill_is_used(tmp_path: Path):
    write_checkpoint(snapshot(value=1), tmp_path / "ba1")
    write_checkpoint(snapshot(value=2), tmp_path / "ba2")
    (tmp_path / "ba2").rename(tmp_path / ".ba2.discarded-17")
    assert find_checkpoint(tmp_path).name == "ba1"
    shutil.rmtree(tmp_path / "ba1")
    assert value_of(find_checkpoint(tmp_path)) == 2
    (tmp_path / ".ba2.discarded-17").rename(tmp_path / ".ba2.partial-17")  # may be incomplete
    with pytest.raises(FileNotFoundError):
        find_checkpoint(tmp_path)
