"""Commands that prune and revive the jobs of sweeps; a revived job equals one that was never pruned."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from sweep_runs import statuses, sweeps

from runner import first_difference
from runner.callbacks._pruning_study import JOURNAL
from runner.records.result import Result, read_result

SHORT = ("model=mlp", "data.batch_size=400", "data.eval_batch_size=300", "trainer.max_duration=4ep")  # 12 batches
DIGESTS = ("callbacks=[checkpoint_saver,state_digest]", "callbacks.state_digest.interval=1ba")
QUIET = (*SHORT, "objective=eval/loss", *DIGESTS)
PRUNED = (*QUIET, "+callbacks=sweep_pruner", "callbacks.sweep_pruner.pruner=successive_halving")
RATES = "optimizer.lr=0.5,0.001,0.0001"  # the first is the best from the first epoch on


def result_of(sweep: Path, lr: str) -> Result:
    result = read_result(sweep / f"lr{lr}-mlp-digits")
    assert result is not None
    return result


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "latest" / "model.pt").read_bytes()


@pytest.mark.slow
def test_a_revived_job_is_bit_identical_to_one_that_was_never_pruned(tmp_path: Path, run_here: Any):
    assert run_here("-m", RATES, *QUIET, "hydra.sweep.dir=full").code == 0
    finished = run_here("-m", RATES, *PRUNED, "hydra.sweep.dir=pruned", code=0)
    assert "1 finished, 2 pruned" in finished.out and finished.err == ""
    pruned, full = tmp_path / "pruned", tmp_path / "full"
    expected = {"0.5": "FINISHED", "0.001": "PRUNED", "0.0001": "PRUNED"}
    assert statuses(pruned) == {f"lr{lr}-mlp-digits": status for lr, status in expected.items()}
    before = result_of(pruned, "0.001")
    assert before.reported == [before.objective] and before.objective != result_of(full, "0.001").objective
    manifest = json.loads((pruned / "lr0.001-mlp-digits/checkpoints/latest/manifest.json").read_text())
    assert manifest["timestamp"]["batch"] == 3  # pruned after the evaluation of the first epoch
    assert "lr0.001-mlp-digits,0.001," in (pruned / "jobs.csv").read_text()

    again = run_here("-m", RATES, *PRUNED, "hydra.sweep.dir=pruned", code=0)  # trains nothing
    assert again.out.count("skipped: it has already ended") == 3 and "--revive all" in again.out

    command = ("-m", RATES, *PRUNED, "hydra.sweep.dir=pruned", "--revive=lr0.001-mlp-digits")
    assert "2 finished, 1 pruned" in run_here(*command, code=0).out
    run_here("resume", "pruned/lr0.0001-mlp-digits", code=0)  # as a single run
    for lr in ("0.001", "0.0001"):
        name = f"lr{lr}-mlp-digits"
        difference = first_difference(pruned / name, full / name)
        assert difference.batch is None and difference.agreed == 12
        assert result_of(pruned, lr).metrics == result_of(full, lr).metrics
        assert result_of(pruned, lr).status == "FINISHED"
        assert weights(pruned / name) == weights(full / name)
    assert result_of(pruned, "0.001").reported == before.reported  # a rerun of a seeded search gets these again


@pytest.mark.slow
def test_wrong_pruning_commands_are_refused(tmp_path: Path, run_here: Any):
    single = run_here(*PRUNED, code=2)
    assert "callbacks.sweep_pruner: compares the jobs of a sweep; add -m" in single.err
    assert "--revive='all': is for rerunning a sweep with -m" in run_here(*QUIET, "--revive", "all", code=2).err
    assert "no job of this sweep has started yet" in run_here("-m", RATES, *PRUNED, "--revive=all", code=2).err
    assert not (tmp_path / "outputs").exists()
    several = run_here("-m", "seed=0", *PRUNED, "objective=[eval/loss,time]", code=2)
    assert "several objectives; name one of them, such as eval/loss" in several.err
    folds = run_here("-m", "sweep=folds", "folds.count=2", *PRUNED, "callbacks.sweep_pruner.pruner=wilcoxon", code=2)
    assert "folds cannot replace seeds" in folds.err

    short = ("-m", RATES, *PRUNED, "hydra.sweep.dir=mine", "trainer.max_duration=1ba")
    run_here(*short, code=0)
    unknown = run_here(*short, "--revive=lr0.6", code=2)
    assert unknown.out == ""
    assert "--revive='lr0.6': this sweep has no such job; allowed: all, lr0.0001-mlp" in unknown.err


OWN = """
import os
import signal
from pathlib import Path

from runner import Callback


class Killer(Callback):
    def eval_after_all(self, state, logger):
        if "0.001" in state.run_name and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_sweep_killed_during_a_pruning_decision_continues(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN)
    command = ("-m", RATES, *PRUNED, "+callbacks.own._target_=own.Killer")
    run_app(*command, exit_code=-signal.SIGKILL)
    (sweep,) = sweeps(tmp_path)
    assert statuses(sweep) == {"lr0.5-mlp-digits": "FINISHED", "lr0.001-mlp-digits": "RUNNING"}
    assert "skipped: it has already ended" in run_app(*command).stdout
    assert [result_of(sweep, lr).status for lr in ("0.5", "0.001", "0.0001")][::2] == ["FINISHED", "PRUNED"]
    assert (sweep / JOURNAL).read_text().count('"job"') == 3  # each job has the trial of its first command


@pytest.mark.slow
def test_two_ranks_are_pruned_together_and_revived_bit_for_bit(tmp_path: Path, run_app: Any):
    two_ranks = ("launch.nproc_per_node=2", "optimizer.lr=0.5,0.001")
    run_app("-m", *two_ranks, *QUIET, "hydra.sweep.dir=full")
    assert "1 finished, 1 pruned" in run_app("-m", *two_ranks, *PRUNED, "hydra.sweep.dir=pruned").stdout
    assert "2 finished" in run_app("-m", *two_ranks, *PRUNED, "hydra.sweep.dir=pruned", "--revive=all").stdout
    name = "lr0.001-mlp-digits"
    difference = first_difference(tmp_path / "pruned" / name, tmp_path / "full" / name)
    assert difference.batch is None and difference.agreed == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [("joblib", "hydra.launcher.n_jobs=2"), ("submitit_local",)], ids=["joblib", "submitit"]
)
def test_jobs_in_several_processes_are_pruned(tmp_path: Path, run_app: Any, launcher: tuple[str, ...]):
    rates = "optimizer.lr=0.5,0.001,0.0001,0.00001,0.000001,0.0000001"
    output = run_app("-m", rates, *PRUNED, f"hydra/launcher={launcher[0]}", *launcher[1:]).stdout
    (sweep,) = sweeps(tmp_path)
    assert "PRUNED" in statuses(sweep).values() and statuses(sweep)["lr0.5-mlp-digits"] == "FINISHED", output
    assert (sweep / JOURNAL).read_text().count('"job"') == 6


@pytest.mark.slow
def test_wilcoxon_prunes_further_seeds_of_a_worse_setting(tmp_path: Path, run_here: Any):
    wilcoxon = ("callbacks.sweep_pruner.pruner=wilcoxon", "trainer.max_duration=2ba", "trainer.eval_interval=2ba")
    command = ("-m", "seed=0,1,2,3,4,5", "optimizer.lr=0.5,0.0001", *PRUNED, *wilcoxon)
    assert "10 finished, 2 pruned" in run_here(*command, "objective=eval/loss", code=0).out
    (sweep,) = sweeps(tmp_path)
    last = read_result(sweep / "lr0.0001-seed5-mlp-digits")
    assert last is not None and last.status == "PRUNED" and last.objective is None
    assert not (sweep / "lr0.0001-seed5-mlp-digits" / "digests.jsonl").exists()  # it trained no batch
    assert "12 finished" in run_here(*command, "objective=eval/loss", "--revive=all", code=0).out
