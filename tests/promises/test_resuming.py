"""A resumed run gives the same bits as one that never stopped.

It is killed at any batch and event, on one process and on two ranks, and with every callback and algorithm that ships.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import BY_NAME, arguments_of, assert_equal_runs
from outcomes import KILLED, Left, assert_equal, kill_and_go_on, read
from sessions import fit, list_events, train_config
from tiers import fast

BATCHES = 20  # of 24: then the EarlyStopper ends it
FAILED = 1  # exit code of a rank whose neighbor is gone


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


@pytest.mark.parametrize("first", fast(range(1, 5), 1))
def test_a_kill_at_any_batch_changes_nothing(sessions: Any, tmp_path: Path, whole: Left, first: int):
    """Each fourth batch, from one of the first four on: all of them together."""
    kills = [("batch_end", batch) for batch in range(first, BATCHES + 1, 4)]
    for run in kill_and_go_on(sessions, tmp_path, kills, save_interval="3ba"):
        assert_equal(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
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


@pytest.mark.parametrize("rank", fast([1, 0, None], 1))
def test_a_kill_of_ranks_changes_nothing(sessions: Any, tmp_path: Path, rank: int | None):
    """Of both ranks, as when the machine goes down, or of one of them, on which the other then waits in vain."""
    sessions.run(fit, ranks=2, run_dir=tmp_path / "whole")
    whole = read(tmp_path / "whole")
    assert whole.outcome["stopped"] and whole.outcome["counts"]["batch"] == BATCHES
    kills = [("batch_end", 4), ("before_backward", 9), ("eval_after_forward", 16), ("after_forward", 19)]
    ends = {None: [KILLED, KILLED], 0: [KILLED, FAILED], 1: [FAILED, KILLED]}[rank]
    runs = [tmp_path / event for event, _ in kills]
    calls = [
        {"run_dir": run, "kill": {"event": event, "batch": batch, "rank": rank}}
        for run, (event, batch) in zip(runs, kills, strict=True)
    ]
    sessions.run_each(fit, calls, ranks=2, ends=ends)
    sessions.run_each(fit, [{"run_dir": run} for run in runs], ranks=2)
    for run in runs:
        assert_equal(run, whole)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on(sessions: Any, tmp_path: Path, before: int, after: int):
    """The samples are the same, and so are all numbers but for rounding; one batch of an epoch leaves a rank empty."""
    sessions.run(fit, ranks=before, run_dir=tmp_path / "whole", chance=False)
    whole = read(tmp_path / "whole")
    assert whole.outcome["counts"]["batch"] == BATCHES and len(whole.ids[7]) == 1
    for event, batch in (("batch_end", 4), ("after_loss", 8), ("after_loss", 14)):
        run = tmp_path / f"{event}-{batch}"
        sessions.run(fit, ranks=before, ends=KILLED, run_dir=run, chance=False, kill={"event": event, "batch": batch})
        sessions.run(fit, ranks=after, run_dir=run, chance=False)
        assert_close(read(run), whole)


def assert_close(left: Left, whole: Left) -> None:
    assert left.ids == whole.ids
    torch.testing.assert_close(left.outcome, whole.outcome, rtol=1e-7, atol=1e-10)
    assert [line["step"] for line in left.logged] == [line["step"] for line in whole.logged]
    losses = ([entry["value"] for entry in one.logged if entry["key"] == "loss/eval/total"] for one in (left, whole))
    assert next(losses) == pytest.approx(next(losses), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), BY_NAME)
def test_a_kill_changes_nothing_with_any_callback_or_algorithm(sessions: Any, tmp_path: Path, group: str, name: str):
    overrides = arguments_of(group, name)
    if name == "load_checkpoint":
        plain = arguments_of(group, "checkpoint_saver")
        sessions.run(train_config, run_dir=tmp_path / "earlier", overrides=plain)
    kill = ("_target_=sessions.Kills", "event=before_backward", "batch=11")
    kills = [f"+callbacks.kills.{setting}" for setting in kill]
    first = sessions.start(train_config, run_dir=tmp_path / "whole", overrides=overrides)
    second = sessions.start(train_config, run_dir=tmp_path / "killed", overrides=[*overrides, *kills])
    codes = sessions.wait([first, second])
    assert codes == [0, KILLED], first.log.read_text() + second.log.read_text()
    sessions.run(train_config, run_dir=tmp_path / "killed", overrides=overrides)
    assert_equal_runs(name, tmp_path / "killed", tmp_path / "whole")
