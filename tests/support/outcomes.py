"""Reads the results of a run from its folder, kills and resumes runs, and compares them."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from python_process import PATIENCE
from sessions import newest, save_each_batch

from runner.checkpoints.files import verify

KILLED = -9


class Left(NamedTuple):
    """The results that a run left in its folder."""

    outcome: dict[str, Any]
    """The final state, see `sessions.outcome`."""
    logged: list[dict[str, Any]]
    """The entries of `metrics.jsonl`, see `logged`."""
    ids: list[list[int]]
    """Sample numbers of each batch over all ranks, as of the last time it was trained."""


def read(run_dir: Path) -> Left:
    """Return the results in a run's folder."""
    return Left(torch.load(run_dir / "outcome.pt", weights_only=True), logged(run_dir), _read_ids(run_dir))


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """Return the entries of `metrics.jsonl` in order of their steps, without the wall time.

    Each metric is an entry of its own, because the metrics of a step may be on one line or on two.
    """
    entries = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        entry.pop("wall_time", None)
        metrics = entry.pop("metrics", None)
        if metrics is None:
            entries.append(entry)
        else:
            entries += [{**entry, "key": key, "value": value} for key, value in metrics.items()]
    return sorted(entries, key=lambda entry: (entry.get("step", 0), entry.get("epoch", 0), json.dumps(entry)))


def _read_ids(run_dir: Path) -> list[list[int]]:
    by_rank: list[dict[int, tuple[int, list[int]]]] = []
    for path in sorted(run_dir.glob("ids*.jsonl")):
        lines = map(json.loads, path.read_text().splitlines())
        by_rank.append({batch: (ranks, ids) for batch, ranks, ids in lines})
    batches = sorted(by_rank[0])
    return [[id for rank in range(by_rank[0][batch][0]) for id in by_rank[rank][batch][1]] for batch in batches]


def assert_equal(run_dir: Path, whole: Left) -> None:
    """Assert that a run left results that are bit-identical to those of an uninterrupted run."""
    left = read(run_dir)
    torch.testing.assert_close(left.outcome, whole.outcome, rtol=0, atol=0, msg=lambda text: f"{run_dir.name}: {text}")
    assert left.logged == whole.logged, run_dir.name
    assert left.ids == whole.ids, run_dir.name


def trained(run_dir: Path) -> int:
    """Return the number of batches that a run had trained, according to the last line of its `progress` file."""
    return int((run_dir / "progress").read_text().split("\n")[-2])


def kill_after(sessions: Any, delays: dict[Path, float]) -> None:
    """Resume runs, and kill each of them a number of seconds after it has trained its first batch."""
    before = {run: (run / "progress").stat().st_size for run in delays}
    running = {run: sessions.start(save_each_batch, run_dir=run) for run in delays}
    kill_at: dict[Path, float] = {}
    deadline = time.monotonic() + PATIENCE
    while (alive := [run for run in delays if running[run].process.poll() is None]) and time.monotonic() < deadline:
        for run in alive:
            if run not in kill_at and (run / "progress").stat().st_size > before[run]:
                kill_at[run] = time.monotonic() + delays[run]
            if time.monotonic() >= kill_at.get(run, deadline):
                running[run].process.kill()
        time.sleep(0.0005)
    for session in running.values():
        assert sessions.wait([session]) == [KILLED], session.log.read_text()


def assert_sound(run: Path, most_lost: int) -> bool:
    """Assert that the checkpoints of a killed run are intact and recent.

    Args:
        run: the run's folder.
        most_lost: number of batches that may have been trained after the newest checkpoint.

    Returns:
        Whether the run was killed during a save, so that a temporary folder is left.
    """
    names = {path.name for path in (run / "checkpoints").glob("*")}
    visible = {name for name in names if not name.startswith(".")}
    assert {name: fault for name in visible if (fault := verify(run / "checkpoints" / name))} == {}
    checkpoint = newest(run)
    saved = json.loads((checkpoint / "manifest.json").read_text())["timestamp"]["batch"] if checkpoint else 0
    assert saved >= trained(run) - most_lost
    return visible != names


def count_trained(run: Path) -> Counter[int]:
    """Return the number of times that each batch was trained."""
    return Counter(json.loads(line)[0] for line in (run / "ids0.jsonl").read_text().splitlines())
