"""Checkpoints on full disks, in read-only folders, of killed processes, and with damaged files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import resource
import shlex
import shutil
import signal
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
from python_process import start_python

from runner.checkpoints.files import (
    find_checkpoint,
    is_complete,
    read_config,
    read_file,
    verify,
)
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
    """What `state.pt` holds at least."""
    dicts = (
        "algorithms",
        "callbacks",
        "train_metrics",
        "train_metric_values",
        "eval_metric_values",
        "evaluated_at",
        "order",
    )
    empty = {"model": None, "optimizers": [], "schedulers": [], "scaler": None, **{name: {} for name in dicts}}
    return {"timestamp": TIME, **empty, **more}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_manifest_names_files_of_its_folder_alone(tmp_path: Path):
    write_checkpoint(snapshot(), tmp_path / "one")
    text = (tmp_path / "one" / "manifest.json").read_text()
    (tmp_path / "one" / "link").symlink_to("/dev/zero")  # reading it never ends
    for name in ("/dev/zero", "../one/model.pt", "link", ".."):
        manifest = json.loads(text)
        manifest["files"][name] = {"size": 0, "sha256": ""}
        (tmp_path / "one" / "manifest.json").write_text(json.dumps(manifest))
        assert verify(tmp_path / "one") == f"its manifest names {name!r}, which is not a file in its folder"


def value_of(path: Path) -> float:
    return float(read_file(path, "model.pt")["weight"][0])


def test_the_config_is_beside_the_weights_and_verified(tmp_path: Path):
    config = {"seed": 0, "optimizer": {"lr": 0.1, "betas": [0.9, float("inf")]}, "path": Path("here"), "none": None}
    write_checkpoint({"timestamp": TIME, "config.json": config, "model.pt": {}}, tmp_path / "one")
    assert read_config(tmp_path / "one") == config | {"path": "here"}
    text = (tmp_path / "one" / "config.json").read_text()
    (tmp_path / "one" / "config.json").write_text(text.replace("0.1", "0.2"))
    assert "config.json was modified" in (verify(tmp_path / "one") or "")
    write_checkpoint({"timestamp": TIME, "model.pt": {}}, tmp_path / "two")
    assert read_config(tmp_path / "two") is None


def test_the_newest_is_the_one_written_last_also_in_a_copy(tmp_path: Path):
    for batch in (9, 3, 6):
        write_checkpoint(snapshot(value=batch), tmp_path / f"ba{batch}")
    for age, batch in enumerate((9, 3, 6)):
        os.utime(tmp_path / f"ba{batch}" / "manifest.json", (1e9 - age, 1e9 - age))
    assert find_checkpoint(tmp_path).name == "ba6"


def test_what_is_written_is_read(tmp_path: Path):
    content = {
        **state(),
        "tensors": [torch.arange(3), {"x": torch.tensor(2.5, dtype=torch.bfloat16)}],
        "n": 3,
        "s": "ä",
        "none": None,
    }
    write_checkpoint({"timestamp": TIME, "model.pt": {}, "state.pt": content}, tmp_path / "a" / "b" / "one")
    path = tmp_path / "a" / "b" / "one"
    found = read_file(path, "state.pt")
    torch.testing.assert_close(found["tensors"], content["tensors"], rtol=0, atol=0)
    assert {key: found[key] for key in ("n", "s", "none")} == {"n": 3, "s": "ä", "none": None}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["timestamp"] == TIME and manifest["files"]["state.pt"]["size"] > 0
    assert is_complete(path) and names(path.parent) == {"one"}


def test_ranks_without_a_snapshot_write_nothing(tmp_path: Path):
    write_checkpoint(None, tmp_path / "none")
    assert not names(tmp_path)


def test_an_existing_checkpoint_is_replaced(tmp_path: Path):
    for value in (1.0, 2.0, 3.0):
        write_checkpoint(snapshot(value=value), tmp_path / "one")
        assert value_of(tmp_path / "one") == value and names(tmp_path) == {"one"}


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "table.csv").write_text("1")
    (tmp_path / "notes").write_text("2")
    for name in ("results", "notes"):
        with pytest.raises(FileExistsError, match="is not a checkpoint"):
            write_checkpoint(snapshot(), tmp_path / name)
    assert names(tmp_path) == {"results", "notes"} and (tmp_path / "results" / "table.csv").read_text() == "1"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for one megabyte; if mounting is not allowed, the size of files is limited instead."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTE}", "tmpfs", str(folder)]
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux" and os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
            stack.callback(subprocess.run, ["umount", str(folder)], check=True)
        else:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            stack.callback(signal.signal, signal.SIGXFSZ, signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
            resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, limits[1]))
        yield folder


@pytest.mark.parametrize("limited", ["disk", "file size"])
def test_a_full_disk_leaves_nothing_under_the_name_and_what_was_there(limited: str, request, tmp_path: Path):
    if limited == "disk":
        folder, full = request.getfixturevalue("small_disk"), {errno.ENOSPC, errno.EFBIG}
        limits = contextlib.nullcontext()
    else:
        folder, full, limits = tmp_path, {errno.EFBIG}, file_size_limit()
    with limits:
        write_checkpoint(snapshot(0.1, value=1.0), folder / "one")
        for name in ("one", "two"):
            with pytest.raises(OSError) as error:
                write_checkpoint(snapshot(5, value=2.0), folder / name)
            assert error.value.errno in full
            assert names(folder) - {"disk"} == {"one"} and value_of(folder / "one") == 1.0
        write_checkpoint(snapshot(0.1, value=3.0), folder / "one")  # there is space again
    assert value_of(folder / "one") == 3.0


@contextlib.contextmanager
def file_size_limit() -> Iterator[None]:
    """Limit the files of this process to one megabyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_in_place_of_a_folder_is_an_os_error(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "one", tmp_path / "file" / "a" / "one"):
        with pytest.raises(OSError):
            write_checkpoint(snapshot(), path)
    assert names(tmp_path) == {"file"} and (tmp_path / "file").read_text() == "mine"


def test_a_read_only_folder_is_an_os_error():
    folder = Path(tempfile.mkdtemp())  # not in tmp_path, whose parents only the owner can enter
    folder.chmod(0o555)
    as_root = os.geteuid() == 0
    try:
        if as_root:
            os.seteuid(65534)  # permissions do not bind root
        with pytest.raises(PermissionError):
            write_checkpoint(snapshot(), folder / "one")
    finally:
        if as_root:
            os.seteuid(0)
        seen = names(folder)
        folder.rmdir()
    assert not seen


def test_what_cannot_be_saved_leaves_nothing(tmp_path: Path):
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        write_checkpoint({"timestamp": TIME, "state.pt": {"function": lambda: None}}, tmp_path / "one")
    assert not names(tmp_path)


def test_all_of_it_is_on_the_disk_before_it_appears_and_its_name_after_that(tmp_path: Path, monkeypatch):
    """A test cannot cut the power, so it checks the calls that make the disk write."""
    done: list[str] = []
    sync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def note_rename(source: Any, target: Any) -> None:
        done.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    write_checkpoint(snapshot(), tmp_path / "checkpoints" / "ep1")
    partial = f".ep1.partial-{os.getpid()}"
    assert done == ["model.pt", "state.pt", "manifest.json", partial, "rename to ep1", "checkpoints"]


def test_a_kill_during_a_write_leaves_only_hidden_names_beside_complete_ones(tmp_path: Path):
    program = f"""
import runpy, sys
sys.path.append({str(Path(__file__).parents[1] / "support")!r})
file = runpy.run_path({__file__!r})
print("ready", flush=True)
for number in range(1000000):
    file["write_checkpoint"](file["snapshot"](4, value=float(number)), "one" if number % 2 else f"ba{{number % 8}}")
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
        seen = names(folder)
        visible = {name for name in seen if not name.startswith(".")}
        # Between the two renames of a replacement, both checkpoints have hidden names.
        assert len(visible) >= 2 and all(is_complete(folder / name) for name in visible), seen
        assert all(".partial-" in name or ".discarded-" in name for name in seen - visible)
        assert value_of(find_checkpoint(folder)) >= 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "checkpoints" / "ep1"
    write_checkpoint(snapshot(), path)
    return path


def seal(path: Path, name: str) -> None:
    """Updates the manifest to match a changed file."""
    import hashlib

    manifest = json.loads((path / "manifest.json").read_text())
    data = (path / name).read_bytes()
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_torn_file_is_refused(checkpoint: Path):
    for name in ("model.pt", "state.pt"):
        data = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(data[: len(data) // 2])
        assert verify(checkpoint) == f"the size of {name} differs from its manifest"
        with pytest.raises(ValueError, match="cannot be used: the size of "):
            find_checkpoint(checkpoint)
        (checkpoint / name).write_bytes(data)
    assert verify(checkpoint) is None


def test_every_flipped_bit_is_refused(checkpoint: Path):
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
def test_a_manifest_that_says_nothing_is_refused(manifest: str, checkpoint: Path):
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
    seal(checkpoint, "model.pt")
    assert verify(checkpoint) is not None  # although its author made the manifest too
    refused = {"zip": "would have to be unpickled, which could run code, so it is rejected", "plain": "not a zip file"}
    with pytest.raises(ValueError, match=refused[form]):
        read_file(checkpoint, "model.pt")
    assert not trap.exists()
    pickle.loads(pickle.dumps(Evil(trap)))
    assert trap.exists()  # the trap works


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 not a zip"])
def test_a_file_that_is_no_checkpoint_is_a_readable_error(content: bytes, checkpoint: Path):
    (checkpoint / "model.pt").write_bytes(content)
    seal(checkpoint, "model.pt")
    with pytest.raises(ValueError, match="model.pt"):
        read_file(checkpoint, "model.pt")


def test_the_error_for_a_file_of_old_torch_has_the_command_that_converts_it(tmp_path: Path):
    old = tmp_path / "old weights.pth"
    torch.save({"weight": torch.arange(3)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="has the format of torch before 1.6; convert it: python -c") as caught:
        read_weights(old, torch.nn.Identity())
    command = shlex.split(str(caught.value).partition("convert it: ")[2])
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True)
    assert torch.equal(read_weights(tmp_path / "new.pth", torch.nn.Identity())["weight"], torch.arange(3))


def test_files_are_read_by_torch_alone(checkpoint: Path):
    """The format is torch's own, readable without this project."""
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
    (folder / "ep3" / "model.pt").write_bytes(b"torn")
    for path in (folder, folder.parent):
        assert find_checkpoint(path) == (folder / "ep2").resolve()
    assert "ep3 is not used: the size of model.pt differs" in caplog.text


def test_none_found(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="no complete checkpoint there"):
            find_checkpoint(path)


def test_what_a_kill_left_while_a_checkpoint_was_replaced_is_found(tmp_path: Path):
    write_checkpoint(snapshot(value=1), tmp_path / "ba1")
    write_checkpoint(snapshot(value=2), tmp_path / "ba2")
    (tmp_path / "ba2").rename(tmp_path / ".ba2.discarded-17")
    assert find_checkpoint(tmp_path).name == "ba1"
    shutil.rmtree(tmp_path / "ba1")
    assert value_of(find_checkpoint(tmp_path)) == 2
    (tmp_path / ".ba2.discarded-17").rename(tmp_path / ".ba2.partial-17")  # which may be damaged unnoticed
    with pytest.raises(FileNotFoundError):
        find_checkpoint(tmp_path)
