"""The first batch of a run shows whether the loss is a mean over samples; the check does not change training."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner import ClassificationModel, Model, SupervisedModel, Trainer
from runner.data import TensorLoader


def masked_loss(outputs: Any, targets: Any) -> Any:
    return F.cross_entropy(outputs, targets, ignore_index=0)


def in_batch_loss(outputs: Any, targets: Any) -> Any:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def random_loss(outputs: Any, targets: Any) -> Any:
    return (outputs * torch.rand_like(outputs)).mean()


class LossInForward(Model):
    """Computes the loss in `forward`, with dropout, batch norm, and an attribute that each forward pass changes."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.hidden = 0.0

    def forward(self, batch):
        logits = self.network(batch[0]) + self.hidden
        self.hidden = logits.detach().mean()
        return {"logits": logits, "loss": F.cross_entropy(logits, batch[1], ignore_index=0)}

    def loss(self, outputs, batch):
        return outputs["loss"]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return inputs * self.scale


class WithLossWeight(LossInForward):
    def loss_weight(self, batch):
        return (batch[1] != 0).sum()


def data() -> TensorLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 3, generator=generator)
    return TensorLoader(inputs, torch.tensor([0, 1, 2, 2, 0, 0, 0, 2] * 2), batch_size=8, shuffle=False)


def fit(model: Model, **options: Any) -> Trainer:
    torch.manual_seed(0)
    with Trainer(
        model=model,
        train_dataloader=data(),
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return trainer


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about the loss so far, and clear the log."""
    warnings = [message for message in caplog.messages if "loss_weight" in message]
    caplog.clear()
    return warnings


@pytest.mark.parametrize("options", [{"grad_accum": 2}, {"microbatch_size": 1}, {"eval_dataloader": data()}])
@pytest.mark.parametrize("loss", [masked_loss, in_batch_loss, nn.MSELoss(reduction="sum")])
def test_a_loss_that_is_not_a_mean_over_samples_gets_a_single_warning(
    loss: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    targets = 0 if isinstance(loss, nn.MSELoss) else 1
    fit(SupervisedModel(nn.Linear(3, 3), loss, targets=targets), **options)
    (message,) = warnings_of(caplog)
    assert "SupervisedModel: the loss of" in message and "define loss_weight(batch)" in message


def test_a_loss_is_also_checked_in_evaluation_without_training(caplog: pytest.LogCaptureFixture):
    with Trainer(model=SupervisedModel(nn.Linear(3, 3), masked_loss), eval_dataloader=data(), device="cpu") as trainer:
        trainer.eval()
    assert len(warnings_of(caplog)) == 1


def test_means_undivided_batches_and_models_with_loss_weight_get_no_warning(caplog: pytest.LogCaptureFixture):
    fit(SupervisedModel(nn.Linear(3, 3), lambda outputs, targets: F.cross_entropy(outputs, targets)), grad_accum=2)
    fit(SupervisedModel(nn.Linear(3, 3), random_loss), grad_accum=2)
    fit(SupervisedModel(nn.Linear(3, 3), masked_loss))
    fit(WithLossWeight(), grad_accum=2)
    assert not warnings_of(caplog)


def test_the_check_of_the_loss_does_not_change_a_bit_of_training(caplog: pytest.LogCaptureFixture):
    checked, unchecked = LossInForward(), WithLossWeight()
    unchecked.load_state_dict(checked.state_dict())
    # Without microbatches loss_weight does not change training; the evaluation is a reason to check the loss.
    for model in (checked, unchecked):
        fit(model, eval_dataloader=data(), max_duration="2ep")
        assert len(warnings_of(caplog)) == (model is checked)
    torch.testing.assert_close(checked.state_dict(), unchecked.state_dict(), rtol=0, atol=0)
    assert torch.equal(torch.as_tensor(checked.hidden), torch.as_tensor(unchecked.hidden))


def test_a_classifier_with_outputs_for_more_classes_than_it_has_is_refused():
    with pytest.raises(ValueError, match=r"num_classes=3: must equal the second size .* Linear returned as \(\d+, 5\)"):
        fit(ClassificationModel(nn.Linear(3, 5), num_classes=3))


@pytest.mark.parametrize(
    ("layer", "loss_fn", "is_warned"),
    [
        (nn.Softmax(dim=1), None, True),
        (nn.Softmax(dim=1), nn.CrossEntropyLoss(label_smoothing=0.1), True),
        (nn.LogSoftmax(dim=1), None, False),
        (nn.LogSoftmax(dim=1), nn.NLLLoss(), False),
        (nn.Sigmoid(), None, False),
        (nn.ReLU(), None, False),
    ],
    ids=str,
)
def test_probabilities_that_go_into_cross_entropy_get_a_warning(
    caplog: pytest.LogCaptureFixture, layer: nn.Module, loss_fn: Any, is_warned: bool
):
    fit(ClassificationModel(nn.Sequential(nn.Linear(3, 5), layer), num_classes=5, loss_fn=loss_fn))
    warned = [message for message in caplog.messages if "the outputs are probabilities" in message]
    assert len(warned) == is_warned


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.HuberLoss(), F.l1_loss, partial(F.poisson_nll_loss, full=True)])
@pytest.mark.parametrize("shapes", [((), (1,)), ((1,), (1, 1))], ids=str)
def test_outputs_that_a_loss_would_broadcast_to_the_targets_are_refused(loss_fn: Any, shapes: Any):
    outputs, targets = (torch.randn(8, *shape) for shape in shapes)
    loader = TensorLoader(outputs, targets, batch_size=8, shuffle=False)
    model = SupervisedModel(Scaled(), loss_fn)
    shown = f"{tuple(targets.shape)}, but the outputs of Scaled {tuple(outputs.shape)}"
    message = re.escape(f"targets=1: have the shape {shown}, which")
    for use in ("train_dataloader", "eval_dataloader"):
        loaders: dict[str, Any] = {use: loader}
        trainer = Trainer(model=model, optimizers=torch.optim.SGD, device="cpu", **loaders)
        with trainer, pytest.raises(ValueError, match=message):
            trainer.fit() if use == "train_dataloader" else trainer.eval()


@pytest.mark.parametrize("shapes", [((1,), ()), ((1,), (1,)), ((), ()), ((2, 1), (2,)), ((3,), (3,))], ids=str)
def test_outputs_in_the_shape_of_the_targets_or_with_one_column_are_trained(shapes: Any):
    outputs, targets = (torch.randn(8, *shape) for shape in shapes)
    loader = TensorLoader(outputs, targets, batch_size=8, shuffle=False)
    model = SupervisedModel(Scaled(), nn.MSELoss())
    with Trainer(
        model=model, train_dataloader=loader, max_duration="1ba", optimizers=torch.optim.SGD, device="cpu"
    ) as trainer:
        trainer.fit()


def test_a_loss_function_of_ones_own_may_take_targets_of_another_shape():
    loader = TensorLoader(torch.randn(8), torch.randn(8, 1), batch_size=8, shuffle=False)
    model = SupervisedModel(Scaled(), lambda outputs, targets: F.mse_loss(outputs, targets[:, 0]))
    with Trainer(model=model, eval_dataloader=loader, device="cpu") as trainer:
        trainer.eval()
