"""Two ranks that are killed and gone on with, by as many ranks or by another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import KILLED, Left, assert_equal, read
from sessions import fit
from tiers import one_in

BATCHES = 20  # of 24: then the EarlyStopper ends it
FAILED = 1  # exit code of a rank whose neighbor is gone


@pytest.mark.parametrize("rank", one_in(3, [1, 0, None]))
def test_a_kill_changes_nothing(sessions: Any, tmp_path: Path, rank: int | None):
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


@pytest.mark.parametrize(("before", "after"), one_in(2, [(2, 1), (1, 2)]))
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
