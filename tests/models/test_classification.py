"""ClassificationModel: losses and the accuracy of class numbers and of probabilities."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner.models.classification import ClassificationModel


def test_cross_entropy_takes_class_numbers_and_probabilities():
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(6, 5, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])
    module = nn.Linear(5, 3)
    model = ClassificationModel(module, num_classes=3)
    outputs = model((inputs, labels))
    torch.testing.assert_close(outputs, module(inputs))
    by_hand = -outputs.log_softmax(1)[torch.arange(6), labels].mean()
    torch.testing.assert_close(model.loss(outputs, (inputs, labels)), by_hand)
    torch.testing.assert_close(model.loss(outputs, (inputs, F.one_hot(labels).float())), by_hand)


def test_loss_fn_replaces_cross_entropy():
    model = ClassificationModel(nn.Linear(5, 3), 3, loss_fn=nn.MultiMarginLoss())
    outputs, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    torch.testing.assert_close(model.loss(outputs, (None, labels)), F.multi_margin_loss(outputs, labels))


@pytest.mark.parametrize("kind", ["class numbers", "probabilities", "one-hot"])
def test_accuracy_counts_all_samples_equally_whatever_their_class_and_batch(kind: str):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(50, 4, generator=generator)
    labels = torch.randint(4, (50,), generator=generator).clamp(max=2)  # the classes are not equally frequent
    model = ClassificationModel(nn.Identity(), 4)
    (name, metric), *others = model.metrics(train=False).items()
    assert (name, others) == ("MulticlassAccuracy", [])
    for part in (slice(0, 1), slice(1, 40), slice(40, 50)):
        one_hot = F.one_hot(labels[part], 4)
        targets = {"class numbers": labels[part], "probabilities": 0.4 * one_hot + 0.15, "one-hot": one_hot}[kind]
        model.update_metric((None, targets), outputs[part], metric)
    assert metric.compute().item() == pytest.approx((outputs.argmax(1) == labels).double().mean().item())


def test_accuracy_uses_the_targets_that_validate_returns():
    class Shifted(ClassificationModel):
        def validate(self, batch):
            return self(batch), (batch[1] + 1) % 3

    model = Shifted(nn.Identity(), 3)
    batch = torch.eye(3), torch.tensor([2, 0, 0])
    metric = model.metrics(train=False)["MulticlassAccuracy"]
    model.update_metric(batch, model.eval_forward(batch), metric)
    assert metric.compute().item() == pytest.approx(2 / 3)  # it would be 0 with the targets of the batch


def test_each_call_of_metrics_returns_new_metrics():
    model = ClassificationModel(nn.Identity(), 4)
    assert model.metrics(True)["MulticlassAccuracy"] is not model.metrics(False)["MulticlassAccuracy"]


def test_a_single_class_is_refused():
    with pytest.raises(ValueError, match="num_classes=1: "):
        ClassificationModel(nn.Identity(), 1)
