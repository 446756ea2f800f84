"""Class weights, label smoothing and the focal loss, compared with torch, torchvision and scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from runner import ClassificationModel, Trainer
from runner.data import TensorLoader
from runner.data.classes import balanced_weights
from runner.models.class_losses import class_loss
from runner.models.loss import fractions

WEIGHTS = [0.5, 2.0, 1.25]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS, LABELS = draw(8, 3), torch.tensor([0, 1, 2, 0, 0, 1, 2, 0])
TRUTH = (draw(8, 3, seed=1) > 0).long()


def loss_by_parts(model: Any, logits: Tensor, labels: Tensor, size: int) -> Tensor:
    """Return the loss of a batch in microbatches, weighted as in training."""
    parts = [*zip(logits.split(size), labels.split(size), strict=True)]
    weights = fractions(model, parts)
    return sum(weight * model.loss(part[0], part) for weight, part in zip(weights, parts, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_cross_entropy_in_microbatches_equals_torchs_on_the_whole_batch(weights: Any, smoothing: float):
    model = ClassificationModel(nn.Identity(), 3, class_weights=weights, label_smoothing=smoothing).double()
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = F.cross_entropy(LOGITS, LABELS, weight, label_smoothing=smoothing)
    for size in (8, 3, 1):
        torch.testing.assert_close(loss_by_parts(model, LOGITS, LABELS, size), expected)


def test_focal_loss_equals_the_papers_formula_for_any_split_of_the_batch():
    probability = LOGITS.softmax(1)[torch.arange(8), LABELS]
    weight = torch.tensor(WEIGHTS, dtype=torch.float64)
    losses = -((1 - probability) ** 1.5) * probability.log() * weight[LABELS]
    model = ClassificationModel(nn.Identity(), 3, loss="focal", gamma=1.5, class_weights=WEIGHTS).double()
    for size in (8, 3, 1):
        torch.testing.assert_close(loss_by_parts(model, LOGITS, LABELS, size), losses.sum() / weight[LABELS].sum())
    plain = ClassificationModel(nn.Identity(), 3, loss="focal", gamma=0.0)
    torch.testing.assert_close(plain.loss(LOGITS, (None, LABELS)), F.cross_entropy(LOGITS, LABELS))
    one_hot = F.one_hot(LABELS, 3).double()
    assert model.loss_fn(LOGITS, one_hot) == pytest.approx(float(losses.mean()))


def test_focal_loss_has_finite_gradients_for_certain_and_ignored_targets():
    logits = torch.tensor([[80.0, 0.0], [1.0, 2.0], [0.0, 0.0]], requires_grad=True)
    model = ClassificationModel(nn.Identity(), 2, loss="focal", gamma=0.5)
    model.loss(logits, (None, torch.tensor([0, 1, -100]))).backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all() and not logits.grad[2].any()


def test_multi_label_losses_equal_those_of_torch_and_torchvision():
    model = ClassificationModel(nn.Identity(), 3, multi_label=True, class_weights=WEIGHTS).double()
    weight = torch.tensor(WEIGHTS, dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(LOGITS, TRUTH.double(), pos_weight=weight)
    for size in (8, 3, 1):
        torch.testing.assert_close(loss_by_parts(model, LOGITS, TRUTH, size), expected)
    ops: Any = pytest.importorskip("torchvision").ops
    focal = class_loss(3, "focal", 1.5, multi_label=True)
    expected = ops.sigmoid_focal_loss(LOGITS, TRUTH.double(), alpha=-1, gamma=1.5, reduction="mean")
    torch.testing.assert_close(focal(LOGITS, TRUTH), expected)


def test_multi_label_predictions_and_accuracy_are_per_class():
    model = ClassificationModel(nn.Identity(), 3, multi_label=True)
    predictions = model.predictions((LOGITS, TRUTH), LOGITS)
    assert predictions["prediction"].tolist() == (LOGITS > 0).tolist()
    torch.testing.assert_close(predictions["probabilities"], LOGITS.float().sigmoid())
    metric = model.metrics(train=False)["MultilabelAccuracy"]
    model.update_metric((LOGITS, TRUTH), LOGITS, metric)
    assert metric.compute() == pytest.approx(float(((LOGITS > 0) == TRUTH.bool()).double().mean()))


def test_balanced_weights_equal_those_of_scikit_learn():
    labels = LABELS.numpy()
    expected = compute_class_weight("balanced", classes=numpy.arange(3), y=labels)
    assert balanced_weights(LABELS, 3) == pytest.approx(expected.tolist())
    for column, weight in zip(TRUTH.T, balanced_weights(TRUTH, 3), strict=True):
        no, yes = compute_class_weight("balanced", classes=numpy.arange(2), y=column.numpy())
        assert weight == pytest.approx(yes / no)
    with pytest.raises(ValueError, match="no training sample has class 3"):
        balanced_weights(LABELS, 4)


def test_class_weights_are_not_saved_but_follow_the_dtype_of_the_model():
    model = ClassificationModel(nn.Linear(2, 3), 3, class_weights=WEIGHTS)
    assert [*model.state_dict()] == ["module.weight", "module.bias"]
    loss_fn: Any = model.to(torch.bfloat16).loss_fn
    assert loss_fn.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_weights": [1.0, 2.0]}, r"class_weights=\[1.0, 2.0\]: must be 3 numbers"),
        ({"class_weights": [0, 0, 0]}, "not all 0"),
        ({"class_weights": [1, 1, -1]}, "at least 0"),
        ({"class_weights": "balanced"}, "'balanced' needs data"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0: "),
        ({"loss": "hinge"}, "loss='hinge': "),
        ({"loss": "focal", "gamma": -1.0}, "gamma=-1.0: "),
        ({"loss": "focal", "label_smoothing": 0.1}, "loss='focal' does not smooth labels"),
        ({"loss_fn": nn.MultiMarginLoss(), "loss": "focal"}, "do nothing; leave one of them out"),
        ({"classes": ["a", "b"]}, r"classes=\['a', 'b'\]: must be 3 different names"),
        ({"classes": ["a", "b", "b"]}, "different names"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ClassificationModel(nn.Identity(), 3, **options)


@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
def test_weighted_losses_with_gradient_accumulation_train_like_whole_batches(loss: Any, tmp_path: Path):
    weights = []
    for grad_accum in (1, 3):
        torch.manual_seed(0)
        model = ClassificationModel(nn.Linear(3, 3), 3, loss=loss, class_weights=WEIGHTS)
        with Trainer(
            model=model,
            train_dataloader=TensorLoader(LOGITS.float(), LABELS, batch_size=8, shuffle=False),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
            max_duration="4ep",
            grad_accum=grad_accum,
            device="cpu",
            run_dir=tmp_path / str(grad_accum),
        ) as trainer:
            trainer.fit()
        weights.append(model.get_parameter("module.weight").detach().clone())
    torch.testing.assert_close(*weights)
