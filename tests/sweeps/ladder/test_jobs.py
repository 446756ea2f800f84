"""Commands of ladders: which jobs are swept, which commands are refused, and the prediction from trained jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiers import fast

LADDER = ("-m", "sweep=ladder", "data.batch_size=400", "callbacks=none")
RUNGS = "budget=2e7flop,4e7flop,8e7flop,1.6e8flop"


@pytest.mark.parametrize(
    ("typed", "message"),
    fast(
        [
            (
                ("model=mlp", "budget=1e9flop,2e9flop,4e9flop"),
                "budget=1e9flop,2e9flop,4e9flop: a ladder needs at least 4",
            ),
            (("model=mlp", "budget=1e9flop,2e9flop,4e9flop,2e9flop"), "a ladder needs at least 4 rungs"),
            (("model=mlp", "budget=1e9flop"), "budget=1e9flop: a ladder needs at least 4 rungs"),
            (
                ("model=mlp", "budget=5s,1e9flop"),
                "budget='5s': a ladder needs budgets of compute, in floating-point operations",
            ),
            (("model=mlp", "budget=5x,1e9flop"), "budget='5x': must be wall-clock time above 0"),
            (("model=supervised", RUNGS), "ladder: no known key makes model=supervised larger; sweep the one that"),
            (("model=supervised", "model.module.width=1,2"), "budget: no compute budgets; give at least 4"),
            (("model=mlp", "hydra/sweeper=optuna"), "hydra/sweeper='optuna': a ladder trains every combination"),
        ],
        ("model=mlp", "budget=1e9flop"),
        ("model=mlp", "budget=5s,1e9flop"),
        ("model=supervised", RUNGS),
    ),
)
def test_a_wrong_ladder_is_refused_in_one_line(run_here: Any, tmp_path: Path, typed: tuple[str, ...], message: str):
    error = run_here(*LADDER, *typed, code=2).err
    assert error.startswith(f"error: {message}") or f": {message}" in error, error
    assert len(error.splitlines()) == 1 and not (tmp_path / "outputs").exists()


def test_a_ladder_needs_the_option_m(run_here: Any):
    assert "sweep=ladder: is for several runs; add -m" in run_here(*LADDER[1:], "model=mlp", code=2).err


def test_typed_budgets_and_sizes_replace_those_of_the_ladder(run_here: Any):
    output = run_here("check", *LADDER, "model=mlp", "seed=0", "model.module.dropout=0.0,0.1", RUNGS, code=0).out
    assert output.count("ok config") == 8 and "dropout=0.1" in output and "hidden" not in output


@pytest.mark.slow
def test_the_loss_of_the_held_out_rung_is_predicted(run_here: Any, tmp_path: Path):
    """Sizes and budgets are typed; the config of a job shows its budget in batches."""
    finished = run_here(*LADDER, "model=mlp", "model.module.hidden=[8],[16]", RUNGS, "seed=0,1", "--json", code=0)
    ladder = json.loads(finished.out)["result"]["ladder"]
    assert [rung["flop"] for rung in ladder["rungs"]] == [2e7, 4e7, 8e7, 1.6e8]
    assert [rung["is_held_out"] for rung in ladder["rungs"]] == [False, False, False, True]
    law = ladder["law"]
    assert law["measured"] == pytest.approx(sum(ladder["rungs"][-1]["losses"]) / 2)
    low, high = law["predicted_interval"]
    assert law["is_inside"] == (low <= law["measured"] <= high) and low < law["predicted"] < high
    (folder,) = tmp_path.glob("outputs/sweeps/*/*")
    assert {"ladder.csv", "ladder.png", "ladder.svg"} <= {path.name for path in folder.iterdir()}
    page = (folder / "report.html").read_text()
    assert "<h2>Ladder</h2>" in page and page.count("<svg") == 2
    assert "predicted" in finished.err and "\nlaw " in finished.err
    config = (folder / "budget1.6e8flop-hidden8-seed0-mlp-digits" / "config.yaml").read_text()
    weights = 64 * 8 + 8 * 10
    assert f"budget: 1.6e+08flop = {int(1.6e8 / (6 * weights * 400))}ba" in config and "ladder" not in config
