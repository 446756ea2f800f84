"""Sweeps whose jobs Optuna chooses: several objectives, wrong keys, and studies in a storage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import optuna
import pytest
from sweep_results import result, sweep
from sweep_runs import OWN, QUIET, batches, six, sweeps
from tiers import fast

from runner.sweeps.objectives import find_front, find_importances, several_objectives
from runner.sweeps.settings import Setting, SweepJob

SEARCH = ("-m", "sweep=optuna_tpe", "hydra.sweeper.sampler.n_startup_trials=2", *QUIET)
SEVERAL = ("objective=[eval/loss,time]", "hydra.sweeper.direction=[minimize,minimize]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the user's `own.py`."""
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def setting(lr: float, decay: float, **objectives: float) -> Setting:
    """Return a setting of one job with these objectives."""
    first, *_ = objectives.values()
    job = result(first, f"optimizer.lr={lr}", f"optimizer.weight_decay={decay}")
    job.objectives = dict(objectives)
    job.metrics |= objectives
    values = {"optimizer.lr": lr, "optimizer.weight_decay": decay}
    return Setting(values, [SweepJob(job, values, first)])


def test_the_front_has_the_settings_that_no_other_beats():
    settings = [
        setting(0.1, 0.0, loss=1.0, time=9.0),
        setting(0.2, 0.0, loss=2.0, time=3.0),
        setting(0.3, 0.0, loss=2.0, time=4.0),  # worse than the one before: as much loss, more time
        setting(0.4, 0.0, loss=9.0, time=1.0),
        setting(0.5, 0.0, loss=9.5, time=9.5),
        setting(0.4, 0.1, loss=9.0, time=1.0),  # as good as an earlier one, so both are in the front
    ]
    search = sweep()
    search.directions = ["minimize", "minimize"]
    objectives = several_objectives(settings, search)
    assert objectives == {"loss": True, "time": True}
    assert [best.values["optimizer.lr"] for best in find_front(settings, objectives)] == [0.1, 0.2, 0.4, 0.4]
    higher_loss = {"loss": False, "time": True}
    assert [best.values["optimizer.lr"] for best in find_front(settings, higher_loss)] == [0.4, 0.5, 0.4]


def test_the_key_with_the_largest_effect_is_the_most_important():
    values = [(lr, decay) for lr in (0.01, 0.03, 0.1, 0.3) for decay in (0.1, 0.2, 0.3)]
    settings = [setting(lr, decay, loss=lr**0.5 + 0.001 * decay) for lr, decay in values]
    shares = find_importances(settings)
    assert [*shares] == ["optimizer.lr", "optimizer.weight_decay"] and shares["optimizer.lr"] > 0.9
    assert find_importances(settings[:9]) == {}


@pytest.mark.slow
def test_several_objectives_have_a_front_in_the_report(folder: Path, run_here: Any):
    output = " ".join(run_here(*SEARCH, *SEVERAL, "hydra.sweeper.n_trials=3", code=0).out.split())
    assert " front lr=" in output and "none is better in eval/loss and time" in output
    (search,) = sweeps(folder)
    objectives = [json.loads(path.read_text())["objectives"] for path in search.glob("*/result.json")]
    assert all([*values] == ["eval/loss", "time"] and values["time"] > 0 for values in objectives)
    assert "Pareto front of eval/loss and time: lr=" in (search / "report.html").read_text()
    assert "time (lower is better)" in (search / "report.svg").read_text()


@pytest.mark.parametrize(
    ("keys", "message"),
    fast(
        [
            (
                "+hydra.sweeper.pruner=median",
                "the sweeper has none; +callbacks=sweep_pruner callbacks.sweep_pruner.pruner=",
            ),
            ("hydra.sweeper.pruner=median", "write +callbacks=sweep_pruner callbacks.sweep_pruner.pruner=median"),
            ("hydra.sweeper.direction=down", "hydra.sweeper.direction='down'"),
            ("hydra.sweeper.direction=[minimize,minimize]", "needs a direction for each objective, the metric"),
            (
                "objective=[eval/loss,time]",
                "needs a direction for each objective, eval/loss and time: hydra.sweeper.direction=[",
            ),
            ("objective=[]", "objective=[]: must be a metric, such as eval/loss, a list of metrics, or null"),
        ],
        "hydra.sweeper.pruner=median",
        "objective=[eval/loss,time]",
    ),
)
def test_a_wrong_search_is_refused(folder: Path, run_here: Any, keys: str, message: str):
    error = run_here(*SEARCH, keys, code=2).err
    assert message in error and error.count("error: ") == 1
    assert not (folder / "outputs").exists()


@pytest.mark.slow
def test_a_stored_study_is_continued(folder: Path, run_here: Any):
    """The same command trains only the failed job; another sweep with the study tries new values."""
    stored = (*SEARCH, "hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.n_trials=4")
    command = (*stored, "hydra.sweep.dir=mine")
    assert run_here(*command, code=0).out.count("/4") == 4
    study = optuna.load_study(study_name=None, storage="sqlite:///study.db")
    first = [trial.params for trial in study.trials]
    assert len(first) == 4 == len({*batches(folder)}) / 6
    last = max((folder / "mine").glob("*/result.json"), key=lambda path: path.stat().st_mtime)
    content = json.loads(last.read_text())
    last.write_text(json.dumps({**content, "status": "FAILED", "objective": None, "objectives": {}}))
    shutil.rmtree(last.parent / "checkpoints")
    assert run_here(*command, code=0).out.count("skipped: it has already ended") == 3
    assert batches(folder) == six(last.parent.name)
    study = optuna.load_study(study_name=None, storage="sqlite:///study.db")
    assert [trial.params for trial in study.trials] == [*first, first[-1]]

    other = run_here(*stored, "hydra.sweep.dir=other", f"hydra.sweeper.study_name={study.study_name}", code=0)
    assert "4 finished" in other.out
    trials = optuna.load_study(study_name=None, storage="sqlite:///study.db").trials
    values = [tuple(trial.params.values()) for trial in trials]
    assert len(values) == 9 and len({*values}) == 8  # the failed job has two trials


@pytest.mark.slow
def test_a_job_of_a_search_can_be_evaluated_and_resumed(run_here: Any, folder: Path):
    assert run_here(*SEARCH, "hydra.sweeper.n_trials=1").code == 0
    (job,) = (path.parent for path in sweeps(folder)[0].glob("*/result.json"))
    assert run_here("eval", str(job)).code == 0  # although its preset chooses Optuna's sweeper
    assert run_here("resume", str(job), "trainer.max_duration=8ba").code == 0
    error = run_here("resume", str(job), "hydra/sweeper=optuna", code=2).err
    assert "hydra/sweeper=optuna: is for several runs" in error
