"""The first batch of a run tells whether a loss is a mean over samples, and leaves everything as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner import Model, SupervisedModel, Trainer
from runner.data import TensorLoader


def masked(outputs: Any, targets: Any) -> Any:
    return F.cross_entropy(outputs, targets, ignore_index=0)


def in_batch(outputs: Any, targets: Any) -> Any:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def random_loss(outputs: Any, targets: Any) -> Any:
    return (outputs * torch.rand_like(outputs)).mean()


class InForward(Model):
    """Computes its loss in `forward`, from dropout, batch norm and an attribute that each pass changes."""

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


class Declared(InForward):
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
    found = [one.getMessage() for one in caplog.records if "loss_weight" in one.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize("options", [{"grad_accum": 2}, {"microbatch_size": 1}, {"eval_dataloader": data()}])
@pytest.mark.parametrize("loss", [masked, in_batch, nn.MSELoss(reduction="sum")])
def test_a_loss_that_is_no_mean_over_samples_is_named_once(
    loss: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    targets = 0 if isinstance(loss, nn.MSELoss) else 1
    fit(SupervisedModel(nn.Linear(3, 3), loss, targets=targets), **options)
    (message,) = warnings_of(caplog)
    assert "SupervisedModel: the loss of" in message and "define loss_weight(batch)" in message


def test_a_loss_is_also_checked_in_an_evaluation_alone(caplog: pytest.LogCaptureFixture):
    with Trainer(model=SupervisedModel(nn.Linear(3, 3), masked), eval_dataloader=data(), device="cpu") as trainer:
        trainer.eval()
    assert len(warnings_of(caplog)) == 1


def test_nothing_is_said_where_it_is_a_mean_or_does_not_matter_or_is_declared(caplog: pytest.LogCaptureFixture):
    split: dict[str, Any] = {"grad_accum": 2}
    fit(SupervisedModel(nn.Linear(3, 3), lambda outputs, targets: F.cross_entropy(outputs, targets)), **split)
    fit(SupervisedModel(nn.Linear(3, 3), random_loss), **split)
    fit(SupervisedModel(nn.Linear(3, 3), masked))
    fit(Declared(), **split)
    assert not warnings_of(caplog)


def test_the_check_of_halves_changes_no_bit_of_training(caplog: pytest.LogCaptureFixture):
    checked, declared = InForward(), Declared()
    declared.load_state_dict(checked.state_dict())
    # The weights of microbatches differ, so the batches are whole, and evaluated to make the check matter.
    for model in (checked, declared):
        fit(model, eval_dataloader=data(), max_duration="2ep")
        assert len(warnings_of(caplog)) == (model is checked)
    assert all(torch.equal(one, declared.state_dict()[name]) for name, one in checked.state_dict().items())
    assert torch.equal(torch.as_tensor(checked.hidden), torch.as_tensor(declared.hidden))
