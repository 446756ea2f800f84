"""A disk that is full or read-only for a while."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import restarted
from outcomes import KILLED, assert_equal, read
from sessions import fit, fit_in_trouble

from runner.records.result import Result, read_result


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte and of 64 files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no disk can be mounted here: that takes Linux, root, and the right to do so")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("kind", "reason"), [("full", "No space left on device"), ("read-only", "Read-only file system")]
)
def test_training_goes_on_and_saves_again_when_it_can(
    sessions: Any, tmp_path: Path, disk: Path, kind: str, reason: str
):
    sessions.run(fit, run_dir=tmp_path / "whole")
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk, target_is_directory=True)

    def train_until(batch: int) -> None:
        kill = {"event": "batch_end", "batch": batch}
        sessions.run(fit_in_trouble, ends=KILLED, run_dir=run, kind=kind, disk=disk, kill=kill)

    train_until(10)  # the disk has just been put right
    said = sessions.started[-1].log.read_text()
    assert said.count("was not written: ") == 1 and reason in said
    assert (disk / "latest").resolve() == disk / "ep0-ba3"
    train_until(13)
    assert (disk / "latest").resolve() == disk / "ep1-ba12"
    assert not [*disk.glob(".*")]

    sessions.run(fit, run_dir=run)
    assert_equal(run, read(tmp_path / "whole"))


def test_a_run_without_room_for_its_last_checkpoint_is_restarted(tmp_path: Path, disk: Path, run_app: Any):
    folders = {"whole": tmp_path / "whole", "full": tmp_path / "full"}
    for folder in folders.values():
        restarted.prepare(folder)
    run = folders["full"] / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk, target_is_directory=True)
    keep = ("hydra.run.dir=run", "callbacks.checkpoint_saver.keep=1", "model.module.hidden=[32]")
    command = (*restarted.SHORT, *keep, *restarted.strikes("nothing", times=0))
    run_app(*command, folder=folders["whole"])
    full = ("+callbacks.full._target_=own.Full", f"+callbacks.full.disk={disk}")
    ended = run_app(*command, *full, folder=folders["full"])
    (line,) = restarted.restarts(ended.stderr)
    assert line.startswith(
        "restart 1 of 3, from batch 20, because the machine failed: OSError: the run's last checkpoint"
    )
    restarted.assert_equal(*(restarted.left_in(folder / "run") for folder in folders.values()))


def test_what_came_of_a_run_is_said_though_no_file_can_be_made(disk: Path):
    result = Result("RUNNING", "run", "", [])
    result.write(disk)
    fill(disk)
    result.status, result.error = "FAILED", {"message": "a trace\n" * 100}
    result.write(disk)
    assert read_result(disk) == result
    result.status, result.error = "FINISHED", None
    result.write(disk)
    assert read_result(disk) == result and not [*disk.glob(".*")]


def fill(disk: Path) -> None:
    """Take all files that a disk can hold."""
    with pytest.raises(OSError, match="No space left"):
        for number in range(64):
            (disk / f"{number}.taken").touch()
