"""SweepPruner: refused arguments, and the study that jobs share. `tests/sweeps/test_pruning.py` runs whole sweeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from engine_runs import make_trainer
from optuna.storages import journal
from python_process import PATIENCE, start_python

from runner.callbacks import SweepPruner
from runner.callbacks._pruning_study import JOURNAL, PruningStudy, make_pruner


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pruner": "medin"}, "pruner='medin': must be one of 'median', 'successive_halving', 'hyperband', 'wilcoxon'"),
        (
            {"options": {"n_trials": 3}},
            "options={'n_trials': 3}: MedianPruner has no n_trials; it takes n_startup_trials",
        ),
        ({"options": {"n_startup_trials": -1}}, "options={'n_startup_trials': -1}: Number of startup trials"),
        ({"pruner": 5}, "pruner=5: must be one of"),
        ({"pruner": optuna.pruners.MedianPruner(), "options": {"n_warmup_steps": 1}}, "without options"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        SweepPruner(**arguments)
    assert message in str(error.value)


def test_a_run_outside_of_a_sweep_is_refused(tmp_path: Path):
    trainer = make_trainer(callbacks=[SweepPruner()], run_dir=tmp_path)
    with pytest.raises(ValueError, match="compares the jobs of a sweep"):
        trainer.fit()


def study(folder: Path, job: str, pruner: str = "median", setting: str = "", seed: int = 0, **options: Any):
    return PruningStudy(folder, job, setting or job, seed, make_pruner(pruner, options), lower_is_better=True)


def test_successive_halving_continues_the_best_third_at_each_rung(tmp_path: Path):
    """Optuna's rule: at rungs 1, 3 and 9, a job continues if it is in the best third of those that reached the rung."""
    values = [0.5, 0.4, 0.6, 0.3, 0.35, 0.9]
    jobs = [study(tmp_path, str(value), "successive_halving", reduction_factor=3) for value in values]
    assert [job.should_prune(value, 1) for job, value in zip(jobs, values, strict=True)] == [
        *(False, False),  # each is the best so far
        *(True, False, True),  # of three, four or five, one continues
        True,
    ]
    assert not jobs[3].should_prune(0.3, 2)  # not a rung


def test_a_job_keeps_its_trial_over_sessions_and_is_pruned_once(tmp_path: Path):
    first = study(tmp_path, "a")
    first.should_prune(1.0, 1)
    second = study(tmp_path, "a")
    assert not second.was_pruned and not second.should_prune(1.0, 1)  # reported before, which gives no warning
    second.prune()
    third = study(tmp_path, "a")
    assert third.was_pruned
    third.finish(0.5)  # ignored
    assert study(tmp_path, "a").was_pruned
    assert jobs(tmp_path) == [("a", "PRUNED")]


def jobs(folder: Path) -> list[tuple[str, str]]:
    """Return the jobs in a journal, as Optuna reads it."""
    storage = journal.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL)))
    trials = optuna.load_study(study_name="pruning", storage=storage).trials
    return [(trial.user_attrs["job"], trial.state.name) for trial in trials]


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_job_without_a_finite_result_prunes_no_other(tmp_path: Path, value: float | None):
    study(tmp_path, "a", n_startup_trials=0).finish(value)
    assert not study(tmp_path, "b", n_startup_trials=0).should_prune(1e9, 1)


def test_wilcoxon_compares_a_setting_with_the_best_one_over_the_same_seeds(tmp_path: Path):
    for seed in range(5):
        study(tmp_path, f"good{seed}", "wilcoxon", "good", seed).finish(0.1 + seed)
    for seed in range(4):
        bad = study(tmp_path, f"bad{seed}", "wilcoxon", "bad", seed)
        assert not bad.should_prune_setting()  # 1 / 8 is the smallest p of three pairs, and the threshold is 0.1
        bad.finish(0.2 + seed)
    assert study(tmp_path, "bad4", "wilcoxon", "bad", 4).should_prune_setting()
    assert not study(tmp_path, "good5", "wilcoxon", "good", 5).should_prune_setting()
    for seed in range(10, 14):
        study(tmp_path, f"other{seed}", "wilcoxon", "other", seed).finish(9.0)
    assert not study(tmp_path, "other14", "wilcoxon", "other", 14).should_prune_setting()  # no other has its seeds


def test_the_incomplete_line_of_a_killed_process_is_removed(tmp_path: Path):
    study(tmp_path, "a").should_prune(1.0, 1)
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"op_code": 6, "worker')
    study(tmp_path, "b").should_prune(2.0, 1)
    study(tmp_path, "c").should_prune(3.0, 1)
    assert '"worker{' not in (tmp_path / JOURNAL).read_text()
    assert (tmp_path / JOURNAL).read_bytes().endswith(b"\n")


WRITER = """
import sys
from pathlib import Path
from runner.callbacks._pruning_study import PruningStudy, make_pruner
for number in range(10):
    PruningStudy(Path(), f"{sys.argv[1]}{number}", "", 0, make_pruner("median", {}), True).should_prune(1.0, 1)
"""


def test_two_processes_write_to_one_journal(tmp_path: Path):
    writers = [start_python(["-c", WRITER, name], cwd=tmp_path) for name in "ab"]
    assert [writer.wait(PATIENCE) for writer in writers] == [0, 0]
    assert sorted(jobs(tmp_path)) == sorted((f"{name}{number}", "RUNNING") for name in "ab" for number in range(10))
