"""Baselines: `eval` without a run evaluates a model before training, so that trained runs can be compared with it."""

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
    """The result of an evaluation of an untrained model, in the folder `before`."""
    finished = run_here("eval", *MODEL, "callbacks=[mlflow_logger,checkpoint_saver]", "hydra.run.dir=before", code=0)
    assert "the initial weights of the model" in finished.out
    return json.loads((tmp_path / "before" / "result.json").read_text())


def test_a_baseline_is_a_finished_run_without_batches_and_checkpoints(baseline: dict[str, Any], tmp_path: Path):
    assert baseline["status"] == "FINISHED" and baseline["batches"] == 0
    assert {"config.yaml", "environment.json", "result.json"} <= {path.name for path in (tmp_path / "before").iterdir()}
    assert not (tmp_path / "before" / "checkpoints").exists()
    sql = "select value from metrics join runs using (run_uuid) where status = 'FINISHED' and step = 0 and key = ?"
    losses = stores.query(tmp_path / "outputs" / "mlflow.db", sql, "loss/eval/total")
    assert losses == [(pytest.approx(baseline["metrics"]["eval/loss"]),)]
    tags = stores.query(tmp_path / "outputs" / "mlflow.db", "select value from tags where key = 'runner.baseline'")
    assert tags == [("true",)]


def test_a_baseline_has_the_metrics_of_the_model_at_the_start_of_training(baseline: dict[str, Any], run_here: Any):
    """A run with a learning rate of 0 ends with the same metrics."""
    run_here(*MODEL, "optimizer.lr=0.0", "callbacks=none", "hydra.run.dir=frozen", code=0)
    frozen = json.loads(Path("frozen/result.json").read_text())
    for name in ("eval/loss", "eval/MulticlassAccuracy"):
        assert frozen["metrics"][name] == pytest.approx(baseline["metrics"][name], rel=1e-6)


def test_verdict_and_table_compare_a_baseline_with_trained_runs(baseline: dict[str, Any], run_here: Any):
    for seed in range(2):
        run_here(*MODEL, f"seed={seed}", "callbacks=none", f"hydra.run.dir=outputs/d/trained{seed}", code=0)
    verdict = run_here("verdict", "before", "outputs/d/trained*")
    assert "training none -> 2ep" in verdict.out and "minus A" in verdict.out
    run_here("eval", *MODEL, "callbacks=none", "hydra.run.dir=outputs/d/before", code=0)
    table = run_here("table", "model=mlp", "--rows", "verb", code=0)
    rows = [line for line in table.out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["verb", "---", "eval", "train"]
    assert "(1)" in rows[2] and "(2)" in rows[3]
    by_model = run_here("table", "model=mlp", "--rows", "model", code=0)
    assert "(2)" in by_model.out and "(3)" not in by_model.out  # baselines count only if `verb` is a key of the table


def test_an_untrained_model_predicts_only_if_the_command_names_it(run_here: Any, tmp_path: Path):
    run_here("predict", *MODEL, "--format=pt", "callbacks=none", "hydra.run.dir=predicted", code=0)
    predictions = torch.load(tmp_path / "predicted" / "predictions.pt", weights_only=True)
    assert predictions["probabilities"].shape == (597, 10)
    finished = run_here("eval", "data=digits", code=2)
    assert "needs saved weights" in finished.err and "with model=... alone, the untrained model is used" in finished.err
