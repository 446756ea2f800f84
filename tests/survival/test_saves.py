"""Kills while checkpoints are being written, and checkpoints that were harmed afterwards."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import KILLED, assert_equal, read
from python_process import PATIENCE
from sessions import fit, newest, save_each_batch
from tiers import one_in

from runner.checkpoints.files import verify

LONGEST = 0.08  # seconds from the first batch of a session to its end


def trained(run_dir: Path) -> int:
    """Batches that the run has trained, according to itself."""
    return int((run_dir / "progress").read_text().split("\n")[-2])


def kill_after(sessions: Any, delays: dict[Path, float]) -> None:
    """Go on with runs, and kill each so many seconds after it has trained a batch."""
    before = {run: (run / "progress").stat().st_size for run in delays}
    running = {run: sessions.start(save_each_batch, run_dir=run) for run in delays}
    kill_at: dict[Path, float] = {}
    deadline = time.monotonic() + PATIENCE
    while (left := [run for run in delays if running[run].process.poll() is None]) and time.monotonic() < deadline:
        for run in left:
            if run not in kill_at and (run / "progress").stat().st_size > before[run]:
                kill_at[run] = time.monotonic() + delays[run]
            if time.monotonic() >= kill_at.get(run, deadline):
                running[run].process.kill()
        time.sleep(0.0005)
    for session in running.values():
        assert sessions.wait([session]) == [KILLED], session.log.read_text()


def assert_sound(run: Path, most_lost: int) -> bool:
    """Whether a run was killed inside a save; what it left is complete, and recent."""
    names = {path.name for path in (run / "checkpoints").glob("*")}
    visible = {name for name in names if not name.startswith(".")}
    assert {name: fault for name in visible if (fault := verify(run / "checkpoints" / name))} == {}
    found = newest(run)
    saved = json.loads((found / "manifest.json").read_text())["timestamp"]["batch"] if found else 0
    assert saved >= trained(run) - most_lost
    return visible != names


@pytest.mark.parametrize("kills", one_in(2, [8, 100]))
def test_kills_during_saves_lose_an_interval_at_most(sessions: Any, tmp_path: Path, kills: int):
    """Each session goes on where the one before was killed, at a random moment; it fails if it finds leftovers."""
    # In the background one is being written while the batch after it is trained.
    most_lost = {tmp_path / "run": 1, tmp_path / "asynchronous": 2}
    for run in (*most_lost, tmp_path / "whole"):
        run.mkdir()
        (run / "progress").touch()
    moments, inside = random.Random(0), 0
    for _ in range(kills):
        kill_after(sessions, {run: moments.uniform(0, LONGEST) for run in most_lost})
        inside += sum(assert_sound(run, lost) for run, lost in most_lost.items())
    assert inside > kills / 2, "the kills have missed the saves"
    for run in most_lost:
        last = f"{trained(run) + 3}ba"
        sessions.run(save_each_batch, run_dir=run, max_duration=last)
        assert not [*(run / "checkpoints").glob(".*")]
        names = {path.name for path in (run / "checkpoints").iterdir()} - {"latest", "best"}
        assert len(names) <= 3  # two newest and one best: what kills kept from being removed is gone as well
        sessions.run(save_each_batch, run_dir=tmp_path / "whole", max_duration=last, save=False)
        outcomes = [torch.load(folder / "outcome.pt", weights_only=True) for folder in (run, tmp_path / "whole")]
        torch.testing.assert_close(*outcomes, rtol=0, atol=0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARMS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped": ("model.pt", flip, "model.pt was modified: its SHA-256 differs from its manifest"),
    "missing": ("state.pt", Path.unlink, "state.pt is missing"),
}


def test_a_harmed_checkpoint_is_named_and_the_one_before_is_used(sessions: Any, tmp_path: Path):
    sessions.run(fit, run_dir=tmp_path / "whole")
    killed = {"event": "batch_end", "batch": 18}
    sessions.run(fit, ends=KILLED, run_dir=tmp_path / "killed", save_interval="8ba", kill=killed)
    for name, (file, harm, _) in HARMS.items():
        shutil.copytree(tmp_path / "killed", tmp_path / name, symlinks=True)
        harm(tmp_path / name / "checkpoints" / "ep1-ba16" / file)
    sessions.run_each(fit, [{"run_dir": tmp_path / name} for name in HARMS])
    for name, session in zip(HARMS, sessions.started[2:], strict=True):
        said = session.log.read_text()
        assert said.count("ep1-ba16 is not used: ") == 1 and HARMS[name][2] in said, name
        assert_equal(tmp_path / name, read(tmp_path / "whole"))
        assert count_trained(tmp_path / name)[8] == 2 > count_trained(tmp_path / name)[7], name


def count_trained(run: Path) -> Counter[int]:
    """How often each batch was trained."""
    return Counter(json.loads(line)[0] for line in (run / "ids0.jsonl").read_text().splitlines())
