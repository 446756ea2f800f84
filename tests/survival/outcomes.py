"""The files that a run left in its folder, to compare with another run's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sessions import fit

KILLED = -9


class Left(NamedTuple):
    """What a run left in its folder."""

    outcome: dict[str, Any]
    logged: list[dict[str, Any]]
    """What `metrics.jsonl` holds: see `logged`."""
    ids: list[list[int]]
    """Sample numbers of each batch over all ranks, as it was trained last."""


def read(run_dir: Path) -> Left:
    """What a run left."""
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
