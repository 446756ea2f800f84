"""Commands of `runner decide`: the answer, the sweep, continuing after a kill, and wrong commands."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from sweep_runs import OWN, batches, statuses, sweeps
from tiers import fast

BATCHES = 5
SHORT = (
    *("model=mlp", "objective=eval/loss", "scheduler=none"),
    *("data.batch_size=300", "data.eval_batch_size=300", f"trainer.max_duration={BATCHES}ba"),
)
QUIET = (*SHORT, "callbacks=[checkpoint_saver]", "+callbacks.own._target_=own.Watch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the user's `own.py`."""
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def decision(folder: Path) -> dict[str, Any]:
    """Return the decision in the results of the only sweep."""
    (sweep,) = sweeps(folder)
    return json.loads((sweep / "results.json").read_text())["decision"]


@pytest.mark.slow
def test_a_learning_rate_of_0_is_worse_after_six_seeds_and_a_rerun_trains_nothing(run_here: Any, folder: Path):
    command = ("decide", "optimizer.lr=0.3,0.0", *QUIET)
    finished = run_here(*command, code=0)
    assert "6 seeds  B " in finished.out and "decision  B is worse than A, after 6 seeds" in finished.out
    result = decision(folder)
    assert (result["is_decided"], result["seeds"], len(batches(folder))) == (True, 6, 12 * BATCHES)
    (comparison,) = result["comparisons"]
    assert comparison["verdict"] == "worse" and comparison["p"] <= 0.05 and comparison["interval"][0] > 0
    first, second = result["objectives"]
    mean = sum(b - a for a, b in zip(first, second, strict=True)) / 6
    assert comparison["difference"] == pytest.approx(mean)
    (sweep,) = sweeps(folder)
    assert {"decision.csv", "decision.svg", "report.html"} <= {path.name for path in sweep.iterdir()}
    start, _, section = (sweep / "report.html").read_text().partition("<h2>Decision</h2>")
    assert "B is worse than A, after 6 seeds" in start and "after 6 seeds" not in section
    assert "B minus A: +" in section and "with a probability of" in section

    again = run_here(*command, "--json", code=0)
    assert json.loads(again.out)["result"]["decision"] == result
    assert batches(folder) == [] and len(statuses(sweep)) == 12


@pytest.mark.slow
def test_settings_with_equal_results_are_equal_within_a_margin(run_here: Any, folder: Path):
    settings = ("+vars.order=1 optimizer.lr=0.1", "+vars.order=2 optimizer.lr=0.1")
    finished = run_here("decide", *settings, "--margin", "0.01", *QUIET, code=0)
    assert "B is equal to A, after 5 seeds" in finished.out
    assert decision(folder)["comparisons"][0]["difference"] == 0


@pytest.mark.slow
def test_an_undecided_comparison_continues_with_more_seeds(run_here: Any, folder: Path):
    command = ("decide", "+vars.order=1,2", *QUIET)
    assert "not decided: B, after 6 seeds" in run_here(*command, "--max-seeds", "6", code=0).out
    batches(folder)
    assert "after 7 seeds" in run_here(*command, "--max-seeds", "7", code=0).out
    assert len(batches(folder)) == 2 * BATCHES


@pytest.mark.slow
def test_a_campaign_shares_one_error_budget(run_here: Any, folder: Path):
    finished = run_here("decide", "optimizer.lr=0.3,0.0", *QUIET, "--campaign", "mine", code=0)
    campaign = json.loads((folder / "outputs/campaigns/mine.json").read_text())
    (comparison,) = campaign["comparisons"].values()
    assert comparison["claim"] == "worse" and comparison["name"] == "optimizer.lr=0.3 | optimizer.lr=0.0"
    assert decision(folder)["comparisons"][0]["p"] <= comparison["level"] < 0.05
    assert "campaigns/mine.json: p must be at most 0.025" in finished.out


@pytest.mark.slow
def test_runs_of_earlier_sweeps_count_as_seeds_of_their_setting(run_here: Any, folder: Path):
    for name, lr in (("good", "0.3"), ("bad", "0.0")):
        run_here("-m", f"optimizer.lr={lr}", "seed=0,1,2,3", f"hydra.sweep.dir=outputs/{name}", *QUIET, code=0)
    batches(folder)
    finished = run_here("decide", "outputs/good", "outputs/bad", *QUIET, code=0)
    assert "decision  B is worse than A, after 6 seeds" in finished.out and len(batches(folder)) == 4 * BATCHES
    assert [len(values) for values in decision(folder)["objectives"]] == [6, 6]
    config = folder / "outputs/bad/seed0-mlp-digits/config.yaml"
    config.write_text(f"{config.read_text()}# changed")
    foreign = run_here("decide", "outputs/good", "outputs/bad", *QUIET, code=2)
    assert "was made by someone else; type its settings" in foreign.err


def test_settings_with_different_evaluation_data_are_not_compared(run_here: Any, folder: Path):
    error = run_here("decide", "data.test_samples=0,100", *QUIET, code=2).err
    assert "evaluation differs in its data from that of" in error and len(batches(folder)) == 2 * BATCHES


@pytest.mark.slow
def test_after_sigkill_a_decision_trains_the_missing_batches(run_app: Any, folder: Path):
    command = ("decide", "optimizer.lr=0.3,0.0", *QUIET, "+callbacks.own.ends=SIGKILL")
    run_app(*command, exit_code=-signal.SIGKILL)
    run_app(*command)
    assert decision(folder)["is_decided"]
    trained = batches(folder)
    assert len(trained) < 13 * BATCHES and len({*trained}) == 12 * BATCHES


@pytest.mark.slow
def test_a_decision_with_two_joblib_workers_takes_six_seeds(run_app: Any, folder: Path):
    run_app("decide", "optimizer.lr=0.3,0.0", *QUIET, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert decision(folder)["seeds"] == 6 and len(batches(folder)) == 12 * BATCHES


@pytest.mark.parametrize(
    ("typed", "message"),
    fast(
        [
            (("model=mlp",), "there is nothing to compare; list values, as in optimizer.lr=0.1,0.2"),
            (("optimizer.lr=0.1,0.2", "seed=1"), "seed: decide trains one seed after another"),
            (("optimizer.lr=0.1,0.2", "sweep=seeds"), "leave out sweep=seeds"),
            (("optimizer.lr=0.1,0.2", "--margin", "0"), "--margin=0.0"),
            (("optimizer.lr=0.1,0.2", "--max-seeds", "5"), "--max-seeds=5: must be at least 6"),
            (("optimizer.lr=0.1,0.2", "--budget", "2"), "--budget='2'"),
            (("optimizer.lr=0.1,0.2", "--campaign", "a/b"), "--campaign='a/b'"),
            (("optimizer.lr=0.1,x", "model=mlp", "--campaign", "mine"), "optimizer.lr"),
        ],
        ("model=mlp",),
        ("optimizer.lr=0.1,0.2", "seed=1"),
        ("optimizer.lr=0.1,x", "model=mlp", "--campaign", "mine"),
    ),
)
def test_a_wrong_decide_command_trains_nothing(run_here: Any, folder: Path, typed: tuple[str, ...], message: str):
    error = run_here("decide", *typed, code=2).err
    assert message in error and error.count("error") == 1
    assert not [*folder.glob("outputs/sweeps/*/*/*")] and not (folder / "outputs/campaigns").exists()
