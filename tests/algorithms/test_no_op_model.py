from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from runner import ClassificationModel, LanguageModel, Model
from runner.algorithms import EMA, LabelSmoothing, MixUp, NoOpModel
from runner.algorithms.no_op_model import _Constant
from runner.models import GPT


def test_the_constant_has_the_shapes_of_the_module():
    constant = _Constant(nn.Linear(4, 3))
    for samples in (5, 2):
        outputs = constant(torch.randn(samples, 4))
        assert torch.equal(outputs, torch.zeros(samples, 3))
    outputs.sum().backward()
    assert constant.value.grad == 6


def test_the_constant_follows_the_samples_and_tokens_of_each_input():
    constant = _Constant(GPT(vocab_size=7, context=8, d_model=4, n_layers=1, n_heads=1))
    for shape in ((2, 8), (3, 5)):
        assert constant(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 7)


class WithLoss(nn.Linear):
    """Returns a loss and an object along with its outputs, as Hugging Face's models do."""

    def forward(self, inputs: Tensor) -> dict:  # pyright: ignore
        outputs = super().forward(inputs)
        return {"loss": outputs.mean(), "logits": outputs, "cache": Counter()}


def test_outputs_may_contain_a_loss_and_other_objects():
    constant = _Constant(WithLoss(4, 3))
    for samples in (5, 2):
        outputs = constant(torch.randn(samples, 4))
        assert outputs["loss"].shape == () and outputs["logits"].shape == (samples, 3) and outputs["cache"] == {}
    outputs["loss"].backward()
    assert constant.value.grad == 1


class Counted(nn.Module):
    """A linear layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 3).double()
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(images.flatten(1))


def test_training_and_evaluation_run_without_the_model(make_trainer):
    net = Counted()
    with make_trainer(NoOpModel(), EMA("2ba"), LabelSmoothing(), MixUp(), model=ClassificationModel(net, 3)) as trainer:
        trainer.fit()
        values = trainer.eval()["eval"]
        assert [*trainer.state.unwrapped_model.parameters()] == [trainer.state.unwrapped_model.module.value]
    assert net.calls == 1
    torch.testing.assert_close(values["loss"], torch.tensor(3.0, dtype=values["loss"].dtype).log())
    assert 0 <= values["MulticlassAccuracy"] < 1


def test_a_language_model_is_replaced(make_trainer):
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    with make_trainer(
        NoOpModel(),
        model=LanguageModel(GPT(vocab_size=4, context=8, d_model=4, n_layers=1, n_heads=1)),
        train_dataloader=[(tokens, tokens)],
        eval_dataloader=[(tokens[:3, :6], tokens[:3, :6])],
        max_duration="1ep",
    ) as trainer:
        trainer.fit()
        torch.testing.assert_close(trainer.state.eval_metric_values["eval"]["BitsPerToken"], torch.tensor(2.0))


class Pair(Model):
    """Has two parts with weights, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(32, 5).double()
        self.decoder = nn.Linear(5, 3).double()
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, batch):
        return {"logits": self.decoder(self.encoder(batch[0].flatten(1)).relu())}

    def loss(self, outputs, batch):
        return self.criterion(outputs["logits"], batch[1])


def test_each_part_with_weights_is_replaced(make_trainer):
    with make_trainer(NoOpModel(), model=Pair()) as trainer:
        trainer.fit()
        kinds = [type(child) for child in trainer.state.unwrapped_model.children()]
        assert kinds == [_Constant, _Constant, nn.CrossEntropyLoss]


def test_an_existing_optimizer_gets_the_constant(make_trainer):
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_trainer(NoOpModel(), model=model, optimizers=optimizer) as trainer:
        assert optimizer.param_groups[0]["params"] == [model.encoder.value, model.decoder.value]
        trainer.fit()


def test_a_model_without_weights_is_refused(make_trainer):
    with pytest.raises(ValueError, match="NoOpModel finds no part with weights"):
        make_trainer(NoOpModel(), model=ClassificationModel(nn.Flatten(), 3), optimizers=None)


def test_a_resumed_run_is_bit_identical(check_resume):
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return (logits[:, 0] - targets).square().mean()  # the constant changes it, unlike the cross-entropy

    check_resume(lambda: [NoOpModel()], build=lambda: ClassificationModel(Counted(), 3, loss))
