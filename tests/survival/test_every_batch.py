"""A run that is killed at any batch and gone on with, against the run that was not killed, to the last bit."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from outcomes import KILLED, Left, assert_equal, kill_and_go_on, read
from sessions import fit, list_events
from tiers import one_in

BATCHES = 20  # of 24: then the EarlyStopper ends it


@pytest.fixture
def whole(sessions: Any, tmp_path: Path) -> Left:
    """The run that nobody kills."""
    sessions.run(fit, run_dir=tmp_path / "whole")
    return read(tmp_path / "whole")


def test_the_run_is_one_that_can_go_wrong(whole: Left):
    """It is stopped early, by a decision that depends on evaluations long before; it sees each sample once an epoch."""
    assert whole.outcome["stopped"] and whole.outcome["counts"]["batch"] == BATCHES
    assert whole.outcome["stopper"]["best_at"]["ba"] == 12
    epochs = [[*chain.from_iterable(whole.ids[first : first + 8])] for first in (0, 8)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(1050)] and epochs[0] != epochs[1]
    losses = [entry["value"] for entry in whole.logged if entry["key"] == "loss/train/total"]
    assert len(losses) == BATCHES == len({*losses})


@pytest.mark.parametrize("first", one_in(4, range(1, 5)))
def test_a_kill_at_any_batch_changes_nothing(sessions: Any, tmp_path: Path, whole: Left, first: int):
    """Each fourth batch, from one of the first four on: all of them together."""
    kills = [("batch_end", batch) for batch in range(first, BATCHES + 1, 4)]
    for run in kill_and_go_on(sessions, tmp_path, kills, save_interval="3ba"):
        assert_equal(run, whole)


@pytest.mark.parametrize("asynchronous", one_in(2, [True, False]))
def test_a_kill_where_each_batch_is_saved_changes_nothing(
    sessions: Any, tmp_path: Path, whole: Left, asynchronous: bool
):
    kills = [("batch_end", batch) for batch in range(1, BATCHES + 1, 3 if asynchronous else 1)]
    for run in kill_and_go_on(sessions, tmp_path, kills, save_interval="1ba", asynchronous=asynchronous):
        assert_equal(run, whole)


@pytest.mark.slow
def test_a_kill_at_any_event_changes_nothing(sessions: Any, tmp_path: Path, whole: Left):
    """Every event that a run fires, each at one of its batches, the batches spread over the run."""
    sessions.run(list_events, run_dir=tmp_path / "events")
    fired: dict[str, list[int]] = {}
    for event, batch in json.loads((tmp_path / "events" / "events.json").read_text()):
        fired.setdefault(event, []).append(batch)
    assert len(fired) > 25
    assert fired.pop("fit_end") == [BATCHES]  # has a test of its own
    kills = [(event, batches[place * 7 % len(batches)]) for place, (event, batches) in enumerate(sorted(fired.items()))]
    for run in kill_and_go_on(sessions, tmp_path, kills):
        assert_equal(run, whole)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_gets_there(sessions: Any, tmp_path: Path, whole: Left):
    """Each session trains a batch or two, and is killed at a later event than the one before."""
    events = ["after_loss", "batch_checkpoint", "before_dataloader", "batch_end", "after_backward"]
    for batch in range(1, BATCHES):
        kill = {"event": events[batch % len(events)], "batch": batch}
        sessions.run(fit, ends=KILLED, run_dir=tmp_path / "run", save_interval="1ba", kill=kill)
    sessions.run(fit, run_dir=tmp_path / "run", save_interval="1ba")
    assert_equal(tmp_path / "run", whole)


def test_a_kill_after_the_last_checkpoint_does_not_undo_an_early_stop(sessions: Any, tmp_path: Path, whole: Left):
    (run,) = kill_and_go_on(sessions, tmp_path, [("fit_end", BATCHES)])
    assert_equal(run, whole)
