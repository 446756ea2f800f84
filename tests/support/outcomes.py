"""The files that a run left in its folder, to compare with another run's."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from python_process import PATIENCE
from sessions import fit, newest, save_each_batch

from runner.checkpoints.files import verify

KILLED = -9


class Left(NamedTuple):
    """The contents of a run's folder."""

    outcome: dict[str, Any]
    logged: list[dict[str, Any]]
    """What `metrics.jsonl` holds: see `logged`."""
    ids: list[list[int]]
    """Sample numbers of each batch over all ranks, as it was trained last."""


def read(run_dir: Path) -> Left:
    """The files and values of a run."""
    return Left(torch.load(run_dir / "outcome.pt", weights_only=True), logged(run_dir), _read_ids(run_dir))


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` holds, without the wall time: an entry a metric, for those of one step may be two lines."""
    found = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        entry.pop("wall_time", None)
        metrics = entry.pop("metrics", None)
        each = [entry] if metrics is None else [{**entry, "key": key, "value": one} for key, one in metrics.items()]
        found += each
    return sorted(found, key=lambda one: (one.get("step", 0), one.get("epoch", 0), json.dumps(one)))


def _read_ids(run_dir: Path) -> list[list[int]]:
    found: list[dict[int, tuple[int, list[int]]]] = []
    for path in sorted(run_dir.glob("ids*.jsonl")):
        lines = map(json.loads, path.read_text().splitlines())
        found.append({batch: (ranks, ids) for batch, ranks, ids in lines})
    batches = sorted(found[0])
    return [[one for rank in range(found[0][batch][0]) for one in found[rank][batch][1]] for batch in batches]


def assert_equal(run_dir: Path, whole: Left) -> None:
    """A run left what another did, to the last bit."""
    left = read(run_dir)
    torch.testing.assert_close(left.outcome, whole.outcome, rtol=0, atol=0, msg=lambda text: f"{run_dir.name}: {text}")
    assert left.logged == whole.logged, run_dir.name
    assert left.ids == whole.ids, run_dir.name


def kill_and_go_on(sessions: Any, folder: Path, kills: Sequence[tuple[str, int]], **arguments: Any) -> list[Path]:
    """Folders of runs, each of which was killed at an (event, batch) and gone on with to its end."""
    runs = [folder / f"{event}-{batch}" for event, batch in kills]
    first = [
        {"run_dir": run, "kill": {"event": event, "batch": batch}, **arguments}
        for run, (event, batch) in zip(runs, kills, strict=True)
    ]
    sessions.run_each(fit, first, ends=KILLED)
    sessions.run_each(fit, [{"run_dir": run, **arguments} for run in runs])
    return runs


def trained(run_dir: Path) -> int:
    """Batches that the run has trained, according to itself."""
    return int((run_dir / "progress").read_text().split("\n")[-2])


def kill_after(sessions: Any, delays: dict[Path, float]) -> None:
    """Resume runs, and kill each a number of seconds after it has trained a batch."""
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


def count_trained(run: Path) -> Counter[int]:
    """How often each batch was trained."""
    return Counter(json.loads(line)[0] for line in (run / "ids0.jsonl").read_text().splitlines())
