"""Trained models in MLflow: how they load without the runner, and when they are not logged."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow_runs import logging_to, points, query
from python_process import run_python
from torch import Tensor, nn

from runner import Callback, ClassificationModel, Trainer
from runner.callbacks import CheckpointSaver, MLflowLogger
from runner.data import TensorLoader

LOAD = """
import importlib.abc, json, sys


class NoRunner(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "runner":
            raise ImportError("there is no runner here")


for name in [*sys.modules]:
    if name.partition(".")[0] == "runner":
        del sys.modules[name]
sys.meta_path.insert(0, NoRunner())
import mlflow.pyfunc, mlflow.pytorch, numpy, torch

uri, inputs = sys.argv[1], numpy.load("inputs.npy")
mlflow.set_tracking_uri(sys.argv[2])
function = mlflow.pyfunc.load_model(uri)
outputs = mlflow.pytorch.load_model(uri)(torch.from_numpy(inputs))
assert numpy.array_equal(function.predict(inputs), outputs.detach().numpy())
numpy.save("outputs.npy", outputs.detach().numpy())
print(json.dumps([str(function.metadata.signature), numpy.shape(function.metadata.load_input_example())]))
"""


class Branching(nn.Linear):
    """A network whose branches depend on the data, which torch cannot export."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.sum() > 0 else super().forward(-input)


def fit(mlflow: MLflowLogger, network: nn.Module, callbacks: Sequence[Callback] = ()) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(12, 2, generator=generator), torch.arange(12) % 2
    trainer = Trainer(
        model=ClassificationModel(network, num_classes=2),
        train_dataloader=TensorLoader(*data, batch_size=4, shuffle=True),
        eval_dataloader=TensorLoader(*(tensor[:8] for tensor in data), batch_size=8, shuffle=False),
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        loggers=[mlflow],
        callbacks=callbacks,
        run_dir="outputs/toy",
        device="cpu",
        max_duration="3ep",
    )
    with trainer:
        trainer.fit()


def load(folder: Path, inputs: Tensor, uri: str) -> tuple[Tensor, Any]:
    """Return the outputs and the description of a logged model from a process without the runner."""
    import numpy as np

    np.save(folder / "inputs.npy", inputs.numpy())
    address = f"sqlite:///{folder}/outputs/mlflow.db"
    finished = run_python(["-c", LOAD, uri, address], cwd=folder, check=True)
    return torch.from_numpy(np.load(folder / "outputs.npy")), json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_process_without_the_runner_loads_the_model(folder: Path) -> None:
    mlflow = MLflowLogger(log_model="last", register_model="toy")
    network = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    fit(mlflow, network)
    network.eval()
    inputs = torch.randn(5, 2)
    outputs, (signature, example) = load(folder, inputs, f"runs:/{mlflow.run_id}/model")
    assert torch.equal(outputs, network(inputs)) and example == [2, 2]
    assert re.findall(r"Tensor\('float32', \(-1, 2\)\)", signature) == ["Tensor('float32', (-1, 2))"] * 2
    [(model_id, status, run_id)] = query("select model_id, status, source_run_id from logged_models")
    assert (status, run_id) == (2, mlflow.run_id)  # ready
    metrics = query("select metric_name, metric_step, dataset_name from logged_model_metrics order by metric_name")
    data = "TensorLoader"
    assert metrics == [("loss/eval/total", 9, data), ("metrics/eval/MulticlassAccuracy", 9, data)]
    assert query("select name, version, run_id, source like ? from model_versions", f"%{model_id}%") == [
        ("toy", 1, mlflow.run_id, 1)
    ]
    assert not list((folder / "outputs" / "toy" / "mlflow" / "files").iterdir())


def test_values_left_out_by_thinning_are_sent_before_the_model_is_logged(folder: Path) -> None:
    fit(MLflowLogger(log_model="last", max_values_per_second=1e-4), nn.Linear(2, 2))
    assert [step for step, _ in points("loss/eval/total")] == [3, 9]
    assert query("select distinct metric_step from logged_model_metrics") == [(9,)]


def test_log_model_best_logs_the_weights_of_the_best_checkpoint(folder: Path) -> None:
    saver = CheckpointSaver(monitor="eval/loss", mode="max")  # the largest loss, which is not the last
    mlflow = MLflowLogger(log_model="best")
    network = nn.Linear(2, 2)
    fit(mlflow, network, callbacks=[saver])
    best = saver.best_checkpoint
    assert best is not None and best.name == "ep1-ba3"
    weights = torch.load(best / "model.pt", weights_only=True)
    inputs = torch.randn(3, 2)
    outputs, _ = load(folder, inputs, f"runs:/{mlflow.run_id}/model")
    torch.testing.assert_close(outputs, inputs @ weights["module.weight"].T + weights["module.bias"])
    assert not torch.equal(outputs, network(inputs))
    assert query("select distinct metric_step from logged_model_metrics") == [(3,)]


def test_a_model_that_cannot_be_exported_gives_only_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        fit(MLflowLogger(log_model="last"), Branching(2, 2))
    [record] = [record for record in caplog.records if record.name == "runner"]
    assert "the model is not logged" in record.getMessage()
    assert query("select status from runs") == [("FINISHED",)] and query("select * from logged_models") == []


def test_a_model_that_is_sent_twice_is_in_mlflow_once(folder: Path) -> None:
    mlflow = MLflowLogger(log_model="last", register_model="toy")
    fit(mlflow, nn.Linear(2, 2))
    run = folder / "outputs" / "toy" / "mlflow"
    sent = json.loads((run / "sent.json").read_text())
    (run / "sent.json").write_text(json.dumps({**sent, "offset": 0, "ended": False}))
    with logging_to(MLflowLogger(), "outputs/toy"):
        pass
    assert json.loads((run / "sent.json").read_text())["offset"] > sent["offset"]
    assert query("select count(*), max(status) from logged_models") == [(1, 2)]
    assert query("select name, version from model_versions") == [("toy", 1)]


@pytest.mark.parametrize("name", ["..", "", "../..", uuid.UUID(int=1).hex], ids=repr)
def test_a_spool_entry_cannot_log_a_model_from_outside_the_run(folder: Path, name: str) -> None:
    (folder / "model.pt2").write_text("precious")
    with logging_to(MLflowLogger(), "r"):
        pass
    entry = {"model": name, "weights": "last", "s": 1, "digest": "0", "torch": "2"}
    with (folder / "r" / "mlflow" / "spool.jsonl").open("a") as spool:
        spool.write(json.dumps(entry) + "\n")
    (folder / "r" / "mlflow" / "files").mkdir()
    (folder / "r" / "mlflow" / "files" / uuid.UUID(int=1).hex).mkdir()
    (folder / "r" / "mlflow" / "files" / uuid.UUID(int=1).hex / "model.pt2").symlink_to(folder / "model.pt2")
    with logging_to(MLflowLogger(), "r"):
        pass
    assert query("select * from logged_models") == [] and (folder / "model.pt2").read_text() == "precious"
    assert "model was left out" in (folder / "r" / "mlflow" / "writer.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_model": "first"}, "log_model='first': must be one of None, 'last', 'best'"),
        ({"register_model": "toy"}, "register_model='toy': no model is logged; add log_model=last or best"),
        ({"log_model": "last", "register_model": "a/b"}, "register_model='a/b': must be a name without '/' and ':'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MLflowLogger(**arguments)


def test_log_model_best_needs_a_metric_for_the_best_checkpoint(folder: Path) -> None:
    with pytest.raises(ValueError, match="log_model='best': the best checkpoint needs a metric"):
        fit(MLflowLogger(log_model="best"), nn.Linear(2, 2), callbacks=[CheckpointSaver()])
    assert not (folder / "outputs" / "toy").exists()
