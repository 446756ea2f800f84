"""SupervisedModel: inputs, targets, losses and metrics by name, and three kinds of training without a subclass."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from runner import ClassificationModel, SupervisedModel, Trainer
from runner.callbacks import ExportForInference, InMemoryLogger
from runner.data import DatasetLoader, TensorLoader
from runner.libraries.torchmetrics import import_torchmetrics

torchmetrics: Any = import_torchmetrics()


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


def fit(model: SupervisedModel, train: Any, evaluation: Any = None, **options: Any) -> InMemoryLogger:
    memory = InMemoryLogger()
    options = {"max_duration": "20ep", "eval_interval": "20ep", **options}
    with Trainer(
        model=model,
        train_dataloader=train,
        eval_dataloader=evaluation,
        optimizers=lambda params: torch.optim.Adam(params, lr=0.03),
        loggers=[memory],
        **options,
    ) as trainer:
        trainer.fit()
    return memory


def last(memory: InMemoryLogger, key: str) -> float:
    return memory.data[key][-1][1]


@pytest.mark.parametrize("is_integer", [False, True], ids=["float", "int"])
def test_regression_with_targets_of_one_dimension_reaches_the_least_squares_loss(is_integer: bool):
    features = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    targets = features @ torch.tensor([1.0, -2.0, 3.0]) + 1
    targets = targets.round().long() if is_integer else targets
    model = SupervisedModel(nn.Linear(3, 1), nn.MSELoss(), {"mse": torchmetrics.MeanSquaredError()})
    loader = TensorLoader(features, targets, batch_size=16, shuffle=True)
    memory = fit(model, loader, TensorLoader(features, targets, batch_size=50, shuffle=False), max_duration="60ep")
    design = torch.cat([features, torch.ones(64, 1)], dim=1)
    solution = torch.linalg.lstsq(design, targets.float()[:, None]).solution
    least_loss = (design @ solution - targets.float()[:, None]).square().mean()
    assert last(memory, "metrics/eval/mse") == pytest.approx(float(least_loss), abs=0.05)
    assert last(memory, "loss/eval/total") == pytest.approx(last(memory, "metrics/eval/mse"), rel=1e-5)


def test_multi_label_classification_accepts_integer_targets_in_a_mapping():
    features = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    samples = [{"id": i, "x": row, "labels": (row > 0).long()} for i, row in enumerate(features)]
    loader = DatasetLoader(samples, batch_size=16, shuffle=True)
    f1 = torchmetrics.F1Score(task="multilabel", num_labels=3, average="macro")
    model = SupervisedModel(nn.Linear(3, 3), nn.BCEWithLogitsLoss(), {"f1": f1}, inputs="x", targets="labels")
    memory = fit(model, loader, DatasetLoader(samples, batch_size=20, shuffle=False))
    logits = model.module(features)
    expected = torchmetrics.functional.classification.multilabel_f1_score(logits, (features > 0).long(), 3)
    assert last(memory, "metrics/eval/f1") == pytest.approx(float(expected), rel=1e-5) and expected > 0.9


def test_segmentation_learns_the_class_of_each_pixel():
    images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    masks = (images[:, 0] > 0).long()
    iou = torchmetrics.JaccardIndex(task="multiclass", num_classes=2)
    model = SupervisedModel(nn.Conv2d(1, 2, 1), nn.CrossEntropyLoss(), {"iou": iou})
    memory = fit(model, TensorLoader(images, masks, batch_size=4, shuffle=True), grad_accum=2)
    assert last(memory, "metrics/train/iou") > 0.9


def test_inputs_and_targets_select_entries_of_the_batch_as_positions_or_keywords():
    class Joined(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left - 2 * right

    def loss(outputs: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (weight * (outputs - targets)).mean()

    batch = {"a": torch.ones(2), "b": torch.full((2,), 3.0), "y": torch.zeros(2), "w": torch.full((2,), 10.0)}
    for inputs, targets, container in (
        (["a", "b"], ["y", "w"], batch),
        ({"right": "b", "left": "a"}, {"weight": "w", "targets": "y"}, batch),
        ([0, 1], [2, -1], tuple(batch.values())),
        (["a", "b"], ["y", "w"], SimpleNamespace(**batch)),
    ):
        model = SupervisedModel(Joined(), loss, inputs=inputs, targets=targets)
        outputs = model(container)
        assert outputs.tolist() == [-5, -5] and float(model.loss(outputs, container)) == -50


def test_each_call_of_metrics_returns_new_metrics():
    metrics = {"mse": torchmetrics.MeanSquaredError()}
    model = SupervisedModel(nn.Linear(3, 1), nn.MSELoss(), metrics)
    first: Any = model.metrics(True)["mse"]
    second: Any = model.metrics(False)["mse"]
    first.update(torch.ones(2), torch.zeros(2))
    assert first is not second and float(first.compute()) == 1 and int(second.total) == 0
    assert not [name for name in model.state_dict() if "mse" in name]
    collection = torchmetrics.MetricCollection(metrics, prefix="my_")
    assert [*SupervisedModel(nn.Linear(3, 1), nn.MSELoss(), collection).metrics(True)] == ["my_mse"]


def test_a_classifier_accepts_other_metrics_and_keys_of_the_batch():
    f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    model = ClassificationModel(nn.Linear(5, 3), 3, metrics={"f1": f1}, inputs="x", targets="y")
    batch = {"y": torch.tensor([0, 1, 2, 2]), "x": torch.randn(4, 5)}
    metric = model.metrics(train=True)["f1"]
    for targets in (batch["y"], nn.functional.one_hot(batch["y"]).float()):  # class numbers and probabilities
        model.update_metric({**batch, "y": targets}, nn.functional.one_hot(batch["y"]).float(), metric)
    assert float(metric.compute()) == 1
    assert {*model.predictions(batch, model(batch))} == {"target", "prediction", "probabilities"}
    assert {*model.predictions({"x": batch["x"]}, model(batch))} == {"prediction", "probabilities"}


def test_a_metric_that_does_not_fit_the_outputs_has_an_error_of_one_line():
    f1 = torchmetrics.F1Score(task="multiclass", num_classes=3)
    model = SupervisedModel(nn.Linear(5, 4), nn.CrossEntropyLoss(), {"f1": f1})
    batch = (torch.randn(2, 5), torch.tensor([0, 3]))
    message = r"metrics: MulticlassF1Score does not fit outputs of shape \(2, 4\) and float32"
    with pytest.raises(ValueError, match=message) as caught:
        model.update_metric(batch, model(batch), model.metrics(True)["f1"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": 3}, "module=3: must be an nn.Module"),
        ({"loss_fn": None}, "loss_fn=None: must be a function of (outputs, targets)"),
        ({"loss_fn": nn.MSELoss}, "MSELoss'>: must be a function of (outputs, targets), such as nn.MSELoss()"),
        ({"inputs": []}, "inputs=[]: must be a position or key of the batch"),
        ({"targets": {"a": None}}, "targets={'a': None}: must be a position or key of the batch"),
        ({"inputs": True}, "inputs=True: must be a position or key"),
        ({"metrics": {"f1": "F1Score"}}, "metrics={'f1': 'F1Score'}: must be torchmetrics by name"),
        ({"metrics": {"f1": {"task": "binary"}}}, "it lacks _target_"),
        ({"metrics": 3}, "metrics=3: must be torchmetrics by name"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        SupervisedModel(**{"module": nn.Linear(2, 1), "loss_fn": nn.MSELoss(), **options})


@pytest.mark.parametrize(
    ("key", "batch", "message"),
    [
        ("y", {"x": 1, "z": 2}, "inputs='y': the batch has the entries 'x', 'z'; give one of them"),
        (2, (1, 2), "inputs=2: the batch has the positions 0 to 1"),
        (1, torch.ones(3), "inputs=1: the batch is a Tensor without this entry"),
    ],
)
def test_a_batch_without_the_entry_of_inputs_is_refused(key: Any, batch: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        SupervisedModel(nn.Identity(), nn.MSELoss(), inputs=key)(batch)


def test_a_module_that_gets_one_entry_of_the_batch_is_exported_without_the_others(tmp_path: Any):
    samples = [{"x": torch.ones(3), "y": torch.tensor(1.0)} for _ in range(4)]
    module = nn.Linear(3, 1)
    model = SupervisedModel(module, nn.MSELoss(), inputs="x", targets="y")
    loader = DatasetLoader(samples, batch_size=2, shuffle=False)
    fit(model, loader, max_duration="1ba", callbacks=[ExportForInference()], run_dir=tmp_path)
    exported = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(exported(torch.ones(5, 3)), module(torch.ones(5, 3)))


def test_a_command_selects_loss_function_and_metrics_by_class_name(run_here: Any):
    short = ["algorithms=none", "callbacks=[console_summary]", "trainer.max_duration=1ba"]
    ended = run_here("model=supervised", "model.loss_fn._target_=torch.nn.L1Loss", "hydra.run.dir=one", *short, code=0)
    assert "eval/mae" in ended.out
    f1 = "+model.metrics.f1={_target_: torchmetrics.F1Score, task: multiclass, num_classes: 10, average: macro}"
    ended = run_here("model=mlp", f1, "hydra.run.dir=two", *short, code=0)
    assert "eval/f1" in ended.out and "MulticlassAccuracy" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["model=mlp", "+model.metrics.f1={_target_: torchmetrics.F1Score, task: multiclass, num_classes: 3}"],
            "metrics: MulticlassF1Score does not fit outputs of shape (4, 10) and float32",
        ),
        (["model=mlp", "+model.metrics.f1={_target_: torchmetrics.F1, task: binary}"], "torchmetrics has no 'F1'"),
    ],
)
def test_check_refuses_wrong_metrics(run_here: Any, arguments: list[str], message: str):
    ended = run_here("check", *arguments, "algorithms=none", code=2)
    assert message in ended.err


def test_flops_per_batch_come_from_the_module_and_the_shape_of_a_sample():
    shapes = []

    class WithFlops(nn.Linear):
        def flops_per_sample(self, shape):
            shapes.append(shape)
            return 7.0 * math.prod(shape)

    model = SupervisedModel(WithFlops(4, 1), nn.MSELoss())
    for batch in [(torch.rand(3, 4), torch.rand(3)), (torch.rand(5, 4), torch.rand(5)), (torch.rand(2, 9),)]:
        assert model.flops_per_batch(batch) == 7.0 * batch[0].numel()
    assert shapes == [(4,), (9,)]  # the module is called once per shape
    assert SupervisedModel(nn.Linear(4, 1), nn.MSELoss()).flops_per_batch((torch.rand(3, 4),)) is None
    keyword_inputs = SupervisedModel(WithFlops(4, 1), nn.MSELoss(), inputs={"input": 0})
    assert keyword_inputs.flops_per_batch((torch.rand(3, 4), torch.rand(3))) is None
