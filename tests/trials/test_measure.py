"""A budget becomes a number of batches by measuring; the run equals one that was given this number."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from composed_configs import composed

from runner.config import build
from runner.config.experiment import Experiment
from runner.failures.errors import WrongKey
from runner.training.budget import Budget
from runner.trials import measure
from runner.trials.measure import Pace, settle_budget

SAVING = "callbacks=[checkpoint_saver]"
TINY = ("model=mlp", "data.batch_size=400", "callbacks=[state_digest]")


@pytest.mark.parametrize("of, expected", [("training", 1000), ("evaluation", 1200), ("all", 519)])
def test_a_budget_is_filled_with_as_many_batches_as_fit(of: str, expected: int):
    budget = Budget("10s", of)
    pace = Pace(0.01, [(0.801, lambda batches: -(-batches // 100))])  # after every 100 batches, and at the end
    assert pace.fill(budget) == expected
    assert pace.seconds(of, expected) <= 10 < pace.seconds(of, expected + 1)


@pytest.mark.parametrize(
    ("budget", "pace", "reason"),
    [
        (Budget("1s"), Pace(1.5, []), "one batch already takes 1.5 s of training"),
        (Budget("1s", "evaluation"), Pace(0.1, []), "the time of evaluation does not grow with the batches"),
        (Budget("1s", "evaluation"), Pace(0.1, [(0.1, lambda batches: 5)]), "does not grow with the batches"),
    ],
)
def test_a_budget_that_no_number_of_batches_fits_is_refused(budget: Budget, pace: Pace, reason: str):
    with pytest.raises(WrongKey, match=reason):
        pace.fill(budget)


def train(experiment: Experiment, folder: Path) -> Any:
    with build.build(experiment, folder, "run") as trainer:
        trainer.fit()
    return trainer.state


def test_measuring_leaves_no_files_and_does_not_change_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "LEAST", 0.05)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settled = settle_budget(Experiment(composed(*TINY, "budget=0.1s of all")), None)
    assert os.listdir(tmp_path) == []
    (batches,) = re.findall("0.1s of all = ([0-9]+)ba", str(settled.budget))
    assert settle_budget(settled, None) is settled
    measured = train(settled, tmp_path / "measured")
    ratio = settled.trainer.get("scale_schedule_ratio")
    plain = train(Experiment(composed(*TINY, f"trainer.scale_schedule_ratio={ratio}")), tmp_path / "plain")
    assert measured.timestamp.batch == plain.timestamp.batch == int(batches)
    digests = [next((tmp_path / name).glob("*digest*")).read_bytes() for name in ("measured", "plain")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_budget_of_operations_counts_all_ranks(tmp_path: Path, run_app: Any, ranks: int):
    """The expected number is 6 operations per weight of a matrix and sample."""
    several = (f"launch.nproc_per_node={ranks}", "callbacks=none", "hydra.run.dir=run")
    run_app(*TINY[:2], *several, "model.module.hidden=[8]", "algorithms=none", "budget=1e7flop")
    weights = 64 * 8 + 8 * 10
    expected = f"1e+07flop = {int(1e7 / (6 * weights * 400))}ba"
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["budget"] == expected


def test_a_budget_of_operations_uses_flops_per_batch_of_the_model():
    tokens = ("data=synthetic_tokens", "data.batch_size=4")
    config = composed(*TINY, "model=gpt", *tokens, "algorithms=none", "budget=1e9flop")
    with build.build(Experiment({**config, "budget": None}), Path("unused"), "run") as trainer:
        model = trainer.state.unwrapped_model
        loader: Any = trainer.state.train_dataloader
        each = model.flops_per_batch(next(iter(loader)))
    assert each is not None
    assert str(settle_budget(Experiment(config), None).budget) == f"1e+09flop = {int(1e9 / each)}ba"


def test_a_budget_without_room_for_one_batch_is_refused():
    with pytest.raises(WrongKey, match="budget='10flop': one batch already takes .* floating-point operations"):
        settle_budget(Experiment(composed(*TINY, "budget=10flop")), None)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rerun_and_a_resumed_run_train_the_same_batches(tmp_path: Path, run_app: Any, ranks: int):
    several = f"launch.nproc_per_node={ranks}"
    run_app(*TINY, several, "callbacks=[state_digest,checkpoint_saver]", "budget=0.5s", "hydra.run.dir=run")
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["budget"]
    rerun = run_app("rerun", "run", "hydra.run.dir=again")
    assert "conf/" not in rerun.stderr and "measured" not in rerun.stderr
    assert yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())["budget"] == recorded
    assert "ok: equal bit for bit" in run_app("compare", "run", "again").stdout
    # With a larger budget, a resumed run is measured again.
    stderr = run_app("resume", "run", "budget=3s").stderr if ranks == 1 else ""
    assert (f"budget: {recorded} -> 3s" in stderr and "measured in" in stderr) or ranks == 2


@pytest.mark.slow
def test_a_paused_job_of_a_sweep_keeps_its_number_of_batches(tmp_path: Path, run_app: Any):
    sweep = ("-m", *TINY, SAVING, "seed=0,1", "hydra.sweep.dir=sweep", "budget=3s", "trainer.session=1s")
    assert "2 paused" in run_app(*sweep).stdout
    configs = sorted(tmp_path.glob("sweep/*/config.yaml"))
    before = [yaml.safe_load(config.read_text())["budget"] for config in configs]
    for _ in range(40):  # the machine may have become slower since the measurement
        if "2 finished" in run_app(*sweep).stdout:
            break
    assert [yaml.safe_load(config.read_text())["budget"] for config in configs] == before
    assert all(json.loads((config.parent / "result.json").read_text())["status"] == "FINISHED" for config in configs)


@pytest.mark.slow
def test_a_wrong_budget_is_one_message(tmp_path: Path, run_app: Any):
    refused = {
        "budget=5ep": "budget='5ep': must be wall-clock time",
        "trainer.budget=5s": "trainer.budget=5s: no such key; write budget=5s",
    }
    for typed, message in refused.items():
        assert message in run_app(*TINY, typed, exit_code=2).stderr
    assert not [*tmp_path.glob("outputs/*/*")]
