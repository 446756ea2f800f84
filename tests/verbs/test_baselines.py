"""Models evaluated before any training, and compared with trained runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stores
import torch

MODEL = ("model=mlp", "data.batch_size=400", "algorithms=none", "trainer.max_duration=2ep", "scheduler=none")


@pytest.fixture
def baseline(run_here: Any, tmp_path: Path) -> dict[str, Any]:
    """The result of an evaluation of a new model."""
    ended = run_here("eval", *MODEL, "callbacks=[mlflow_logger,checkpoint_saver]", "hydra.run.dir=before", code=0)
    assert "those of the model before training" in ended.out
    return json.loads((tmp_path / "before" / "result.json").read_text())


def test_a_baseline_is_a_run_with_the_metrics_of_the_model_as_it_is(baseline: dict[str, Any], tmp_path: Path):
    assert baseline["status"] == "FINISHED" and baseline["batches"] == 0
    assert {"config.yaml", "environment.json", "result.json"} <= {path.name for path in (tmp_path / "before").iterdir()}
    assert not (tmp_path / "before" / "checkpoints").exists()
    sql = "select value from metrics join runs using (run_uuid) where status = 'FINISHED' and step = 0 and key = ?"
    found = stores.query(tmp_path / "outputs" / "mlflow.db", sql, "loss/eval/total")
    assert found == [(pytest.approx(baseline["metrics"]["eval/loss"]),)]
    tags = stores.query(tmp_path / "outputs" / "mlflow.db", "select value from tags where key = 'runner.baseline'")
    assert tags == [("true",)]


def test_a_baseline_equals_the_model_with_which_training_starts(baseline: dict[str, Any], run_here: Any):
    """At a learning rate of 0 a trained run has the same metrics."""
    run_here(*MODEL, "optimizer.lr=0.0", "callbacks=none", "hydra.run.dir=still", code=0)
    still = json.loads(Path("still/result.json").read_text())
    for name in ("eval/loss", "eval/MulticlassAccuracy"):
        assert still["metrics"][name] == pytest.approx(baseline["metrics"][name], rel=1e-6)


def test_verdict_and_table_compare_a_baseline_with_trained_runs(baseline: dict[str, Any], run_here: Any):
    for seed in range(2):
        run_here(*MODEL, f"seed={seed}", "callbacks=none", f"hydra.run.dir=outputs/d/trained{seed}", code=0)
    judged = run_here("verdict", "before", "outputs/d/trained*")
    assert "training none -> 2ep" in judged.out and "minus A" in judged.out
    run_here("eval", *MODEL, "callbacks=none", "hydra.run.dir=outputs/d/before", code=0)
    table = run_here("table", "model=mlp", "--rows", "verb", code=0)
    rows = [line for line in table.out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["verb", "---", "eval", "train"]
    assert "(1)" in rows[2] and "(2)" in rows[3]
    alone = run_here("table", "model=mlp", "--rows", "model", code=0)
    assert "(2)" in alone.out and "(3)" not in alone.out  # a baseline does not count beside trained runs unasked


def test_a_baseline_predicts_and_needs_a_model(run_here: Any, tmp_path: Path):
    run_here("predict", *MODEL, "--format=pt", "callbacks=none", "hydra.run.dir=predicted", code=0)
    found = torch.load(tmp_path / "predicted" / "predictions.pt", weights_only=True)
    assert found["probabilities"].shape == (597, 10)
    ended = run_here("eval", "data=digits", code=2)
    assert "needs saved weights" in ended.err and "with model=... alone, the model is used as it is" in ended.err
