"""Kills for `runner prove`: moments are drawn from a seed, and a run that hangs is ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from runner.trials.kills import EPOCH_END, IN_SAVE, MOMENTS, START, TRAINING, RunPace, TrainingProcess, plan_kills


def test_kills_are_drawn_from_the_seed_over_the_whole_run():
    pace = RunPace(batches=40, epoch_ends=[19, 38], seconds=2.0, seen=[(1, 1.0), (3, 1.25), (4, 2.0)])
    plans = [plan_kills(8, seed, pace, ranks=2) for seed in range(20)]
    assert plan_kills(8, 3, pace, ranks=2) == plans[3] and len({*map(tuple, plans)}) == 20
    for plan in plans:
        assert sorted(kill.moment for kill in plan) == sorted(MOMENTS * 2)
        assert [kill.batch for kill in plan] == sorted(kill.batch for kill in plan)
        assert all(1 <= kill.batch <= 34 and 0 <= kill.fraction < 1 for kill in plan)
        assert all(kill.rank == 0 for kill in plan if kill.moment in (IN_SAVE, START))
    assert {kill.rank for plan in plans for kill in plan if kill.moment in (EPOCH_END, TRAINING)} == {0, 1}
    assert {kill.batch for plan in plans for kill in plan} >= {*range(2, 33)}
    assert [kill.moment for kill in plan_kills(1, 5, pace, ranks=1)] == [IN_SAVE]
    assert [kill.batch for kill in plan_kills(2, 0, RunPace(1, [], 1.0, []), ranks=1)] == [1, 1]
    assert (pace.startup, pace.pause_after(1), pace.pause_after(2), pace.pause_after(4)) == (1.0, 0.25, 0.25, 0.0)


def test_a_run_that_hangs_is_killed_after_the_patience(tmp_path: Path):
    endless = ["callbacks=none", "trainer.max_duration=1000000ep", f"hydra.run.dir={tmp_path / 'run'}"]
    with TrainingProcess(endless, tmp_path, tmp_path / "log", patience=0.2) as session:
        with pytest.raises(TimeoutError, match=r"no batch for 0.2 s after batch 0: the run hangs"):
            session.finish()
        assert session.process.poll() is None
    assert session.process.returncode == -signal.SIGKILL
