"""Ladders before their first job: what is swept, and what is no ladder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LADDER = ("-m", "sweep=ladder", "data.batch_size=400", "callbacks=none")
RUNGS = "budget=2e7flop,4e7flop,8e7flop,1.6e8flop"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("model=mlp", "budget=1e9flop,2e9flop,4e9flop"), "budget=1e9flop,2e9flop,4e9flop: a ladder needs at least 4"),
        (("model=mlp", "budget=1e9flop,2e9flop,4e9flop,2e9flop"), "a ladder needs at least 4 rungs"),
        (("model=mlp", "budget=1e9flop"), "budget=1e9flop: a ladder needs at least 4 rungs"),
        (("model=mlp", "budget=5s,1e9flop"), "budget='5s': a ladder has equal compute, in floating-point operations"),
        (("model=mlp", "budget=5x,1e9flop"), "budget='5x': must be wall-clock time above 0"),
        (("model=supervised", RUNGS), "ladder: no known key makes model=supervised larger; sweep the one that"),
        (("model=supervised", "model.module.width=1,2"), "budget: no compute budgets; give at least 4"),
        (("model=mlp", "hydra/sweeper=optuna"), "hydra/sweeper='optuna': a ladder trains every combination"),
    ],
)
def test_what_is_no_ladder_is_one_message(run_here: Any, tmp_path: Path, typed: tuple[str, ...], message: str):
    done = run_here(*LADDER, *typed, code=2)
    assert done.err.startswith(f"error: {message}") or f": {message}" in done.err, done.err
    assert len(done.err.splitlines()) == 1 and not (tmp_path / "outputs").exists()


def test_a_ladder_is_a_sweep(run_here: Any):
    assert "sweep=ladder: is for several runs; add -m" in run_here(*LADDER[1:], "model=mlp", code=2).err


def test_what_is_typed_takes_the_place_of_what_the_ladder_has(run_here: Any):
    shown = run_here("check", *LADDER, "model=mlp", "seed=0", "model.module.dropout=0.0,0.1", RUNGS, code=0).out
    assert shown.count("ok config") == 8 and "dropout=0.1" in shown and "hidden" not in shown


@pytest.mark.slow
def test_losses_are_predicted_for_the_rung_that_is_held_out(run_here: Any, tmp_path: Path):
    """Sizes that are typed, and of the ladder's budgets others; the config of a job has the batches."""
    done = run_here(*LADDER, "model=mlp", "model.module.hidden=[8],[16]", RUNGS, "seed=0,1", "--json", code=0)
    ladder = json.loads(done.out)["result"]["ladder"]
    assert [one["flop"] for one in ladder["rungs"]] == [2e7, 4e7, 8e7, 1.6e8]
    assert [one["is_held_out"] for one in ladder["rungs"]] == [False, False, False, True]
    law = ladder["law"]
    assert law["measured"] == pytest.approx(sum(ladder["rungs"][-1]["losses"]) / 2)
    low, high = law["predicted_interval"]
    assert law["is_inside"] == (low <= law["measured"] <= high) and low < law["predicted"] < high
    (folder,) = tmp_path.glob("outputs/sweeps/*/*")
    assert {"ladder.csv", "ladder.png", "ladder.svg"} <= {one.name for one in folder.iterdir()}
    page = (folder / "report.html").read_text()
    assert "<h2>Ladder</h2>" in page and page.count("<svg") == 2
    assert "predicted" in done.err and "\nlaw " in done.err
    config = (folder / "budget1.6e8flop-hidden8-seed0-mlp-digits" / "config.yaml").read_text()
    weights = 64 * 8 + 8 * 10
    assert f"budget: 1.6e+08flop = {int(1.6e8 / (6 * weights * 400))}ba" in config and "ladder" not in config
