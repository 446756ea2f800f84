"""SIGTERM and Ctrl-C, wherever training is at that moment: a checkpoint of a whole batch, and nothing is lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from outcomes import assert_equal, read
from sessions import fit, interrupt
from tiers import one_in

PLACES = {"data": 6, "forward": 6, "evaluation": 8, "save": 7}
"""Where a signal comes, and the batches trained when a process that is alone has ended."""
SIGNALS = [signal.SIGTERM, signal.SIGINT]


def batches(run: Path) -> int:
    """Batches trained according to the newest checkpoint, which is that of the last batch on every rank."""
    saved = json.loads((run / "checkpoints" / "latest" / "manifest.json").read_text())["timestamp"]["batch"]
    for path in run.glob("ids*.jsonl"):
        assert json.loads(path.read_text().splitlines()[-1])[0] == saved - 1
    return saved


@pytest.mark.parametrize("number", one_in(2, SIGNALS))
def test_a_process_alone_ends_after_the_batch(sessions: Any, tmp_path: Path, number: int):
    sessions.run(fit, run_dir=tmp_path / "whole")
    calls = [{"run_dir": tmp_path / place, "place": place, "number": number} for place in PLACES]
    sessions.run_each(interrupt, calls, ends=128 + number)
    assert {place: batches(tmp_path / place) for place in PLACES} == PLACES
    sessions.run_each(fit, [{"run_dir": tmp_path / place} for place in PLACES])
    for place in PLACES:
        assert_equal(tmp_path / place, read(tmp_path / "whole"))


TO_RANKS = [
    ("data", signal.SIGTERM, None),
    ("data", signal.SIGINT, 1),
    ("forward", signal.SIGTERM, 1),
    ("evaluation", signal.SIGTERM, None),
    ("evaluation", signal.SIGINT, 0),
    ("save", signal.SIGTERM, 0),
]


@pytest.mark.slow
def test_ranks_end_together(sessions: Any, tmp_path: Path):
    """A signal to one is a signal to all; they agree about once a second."""
    sessions.run(fit, ranks=2, run_dir=tmp_path / "whole")
    runs = [tmp_path / f"{place}-{number}-{rank}" for place, number, rank in TO_RANKS]
    for number in SIGNALS:
        calls = [
            {"run_dir": run, "place": place, "number": number, "rank": rank}
            for run, (place, sent, rank) in zip(runs, TO_RANKS, strict=True)
            if sent == number
        ]
        sessions.run_each(interrupt, calls, ranks=2, ends=128 + number, at_once=4)
    for run, (place, _, _) in zip(runs, TO_RANKS, strict=True):
        assert PLACES[place] <= batches(run) <= PLACES[place] + 8
    sessions.run_each(fit, [{"run_dir": run} for run in runs], ranks=2)
    for run in runs:
        assert_equal(run, read(tmp_path / "whole"))
