from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runs import program_of
from torch import Tensor, nn

from runner import Algorithm, Callback, ClassificationModel, Trainer
from runner.algorithms import SAM, GradientClipping, LabelSmoothing, MixUp, NaNGuard
from runner.algorithms.sam import ascend
from runner.data import TensorLoader
from runner.models import MLP


class Record(Callback):
    """Stores the model before each batch, the batch, and the gradients and weights for the optimizer's step."""

    def __init__(self):
        self.steps: list[Any] = []

    def batch_start(self, state, logger):
        self.model, self.batch = copy.deepcopy(state.unwrapped_model), state.batch

    def after_train_batch(self, state, logger):
        parameters = list(state.unwrapped_model.parameters())
        gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        self.steps.append((self.model, self.batch, gradients, [parameter.detach().clone() for parameter in parameters]))


def sam_gradients(model: nn.Module, loss: Any, rho: float) -> list[Tensor]:
    """Return the gradients by the paper's equations, from a copy of the model."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss(model), parameters)
    norm = torch.stack([gradient.square().sum() for gradient in first]).sum().sqrt()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, first, strict=True):
            parameter += rho * gradient / norm
    return list(torch.autograd.grad(loss(model), parameters))


def test_the_step_has_length_rho():
    weights = [torch.zeros(3, 2), torch.zeros(5)]
    gradients = [torch.randn(3, 2), torch.randn(5)]
    ascend(weights, gradients, 0.3, 1e-12)
    step, gradient = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (weights, gradients))
    torch.testing.assert_close(step, 0.3 * gradient / gradient.norm())


def test_a_gradient_of_zero_moves_no_weight():
    weight = torch.ones(2)
    ascend([weight], [torch.zeros(2)], 0.3, 1e-12)
    assert torch.equal(weight, torch.ones(2))


def test_the_gradient_of_a_quadratic_has_its_closed_form():
    """For the loss w A w / 2 with the gradient A w, SAM takes the gradient A (w + rho A w / |A w|)."""
    w, matrix = torch.tensor([1.0, -2.0]), torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    moved = [w.clone()]
    ascend(moved, [matrix @ w], 0.1, 1e-12)
    slope = matrix @ w
    torch.testing.assert_close(matrix @ moved[0], matrix @ (w + 0.1 * slope / slope.norm()))


@pytest.mark.parametrize("arguments", [{}, {"grad_accum": 3}, {"microbatch_size": 3}])
def test_gradients_are_those_of_the_paper(make_trainer, arguments: dict[str, Any]):
    record = Record()
    with make_trainer(SAM(rho=0.5), callbacks=[record], **arguments) as trainer:
        trainer.fit()
    assert len(record.steps) == 6
    for model, batch, gradients, weights in record.steps:
        expected = sam_gradients(model, lambda model, batch=batch: model.loss(model(batch), batch), 0.5)
        torch.testing.assert_close(gradients, expected)
        torch.testing.assert_close(weights, list(model.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("interval", [2, 3])
def test_batches_between_those_of_the_interval_have_plain_gradients(make_trainer, interval: int):
    record = Record()
    with make_trainer(SAM(rho=0.5, interval=interval), callbacks=[record]) as trainer:
        trainer.fit()
    for index, (model, batch, gradients, _) in enumerate(record.steps):
        plain = torch.autograd.grad(model.loss(model(batch), batch), list(model.parameters()))
        assert torch.allclose(gradients[0], plain[0]) == bool(index % interval)


def test_a_tiny_rho_changes_nothing(make_trainer):
    def trained(*algorithms: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = ClassificationModel(MLP(32, [8], 3, dropout=0.5).double(), 3)
        with make_trainer(*algorithms, MixUp(), LabelSmoothing(), model=model, grad_accum=2) as trainer:
            trainer.fit()
        return dict(model.state_dict())

    torch.testing.assert_close(trained(SAM(rho=1e-300)), trained(), rtol=0, atol=0)


def test_both_passes_smooth_labels(make_trainer):
    record = Record()
    with make_trainer(SAM(rho=0.5), LabelSmoothing(0.3), callbacks=[record]) as trainer:
        trainer.fit()
    for model, (inputs, targets), gradients, _ in record.steps:

        def loss(model: Any, inputs: Any = inputs, targets: Any = targets) -> Tensor:
            return nn.functional.cross_entropy(model((inputs, targets)), targets, label_smoothing=0.3)

        torch.testing.assert_close(gradients, sam_gradients(model, loss, 0.5))


def test_both_passes_have_the_same_dropout(make_trainer):
    dropped: list[Tensor] = []
    model = ClassificationModel(MLP(32, [8], 3, dropout=0.5).double(), 3)
    (dropout,) = (module for module in model.modules() if isinstance(module, nn.Dropout))
    dropout.register_forward_hook(lambda module, inputs, outputs: dropped.append(outputs.detach()))
    with make_trainer(SAM(rho=1e-300), model=model, eval_dataloader=None, max_duration="1ba", grad_accum=2) as trainer:
        trainer.fit()
    assert len(dropped) == 4  # two microbatches, twice
    torch.testing.assert_close(dropped[:2], dropped[2:], rtol=0, atol=0)


def test_running_statistics_are_updated_once_before_the_ascent(make_trainer):
    def buffers(*algorithms: Any) -> dict[str, Tensor]:
        with make_trainer(*algorithms, batch_norm=True, max_duration="1ba") as trainer:
            trainer.fit()
        return dict(trainer.state.unwrapped_model.named_buffers())

    torch.testing.assert_close(buffers(SAM(rho=5.0)), buffers(), rtol=0, atol=0)


@pytest.mark.parametrize("is_listed_first", [False, True])
def test_other_algorithms_see_the_weights_before_the_ascent(make_trainer, is_listed_first: bool):
    class Compare(Algorithm):
        def before_train_batch(self, state, logger):
            self.before = copy.deepcopy(state.unwrapped_model.state_dict())

        def after_train_batch(self, state, logger):
            torch.testing.assert_close(dict(state.unwrapped_model.state_dict()), dict(self.before), rtol=0, atol=0)

    algorithms = [Compare(), SAM(rho=5.0)] if is_listed_first else [SAM(rho=5.0), Compare()]
    with make_trainer(*algorithms, NaNGuard("skip"), GradientClipping("adaptive", 0.01)) as trainer:
        trainer.fit()


class OwnStep(ClassificationModel):
    def metrics(self, train: bool) -> dict[str, Any]:
        return {}

    def training_step(self, state: Any) -> Tensor:
        raise NotImplementedError


def test_runs_that_sam_cannot_train_exactly_are_refused(make_trainer):
    net = nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).double()
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("precision='amp_fp16'", {"precision": "amp_fp16"}),
        ("one optimizer", {"model": ClassificationModel(net, 3), "optimizers": optimizers}),
        ("training_step", {"model": OwnStep(net, 3)}),
        ("microbatch_size='auto'", {"microbatch_size": "auto"}),
    ]
    for message, arguments in cases:
        with make_trainer(SAM(), **arguments) as trainer, pytest.raises(ValueError, match=message):
            trainer.fit()


@pytest.mark.parametrize("is_listed_first", [False, True])
def test_both_passes_see_a_batch_that_another_algorithm_changed(make_trainer, is_listed_first: bool):
    class Halve(Algorithm):
        def before_train_batch(self, state, logger):
            images, targets = state.batch
            state.batch = images / 2, targets

    record = Record()
    algorithms = [Halve(), SAM(rho=0.5)] if is_listed_first else [SAM(rho=0.5), Halve()]
    with make_trainer(*algorithms, callbacks=[record]) as trainer:
        trainer.fit()
    for model, (images, targets), gradients, _ in record.steps:
        halved = images / 2, targets
        expected = sam_gradients(model, lambda model, batch=halved: model.loss(model(batch), batch), 0.5)
        torch.testing.assert_close(gradients, expected)


def test_callbacks_see_one_pass(make_trainer):
    class Count(Callback):
        losses = 0

        def after_loss(self, state, logger):
            self.losses += 1

    count = Count()
    with make_trainer(SAM(), callbacks=[count], grad_accum=2) as trainer:
        trainer.fit()
    assert count.losses == 12  # six batches of two microbatches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"rho": 0.0}, "rho=0.0"), ({"epsilon": 0}, "epsilon=0"), ({"interval": 0}, "interval=0")],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SAM(**arguments)


def test_a_resumed_run_is_bit_identical(check_resume):
    check_resume(lambda: [SAM(rho=0.3, interval=2), MixUp()], batch_norm=True)


def compare_on_a_rank() -> None:
    """Train with SAM on this rank, and compare gradients with the mean of the paper's gradients over ranks."""
    torch.manual_seed(0)
    images, targets = torch.randn(16, 4, dtype=torch.float64), torch.arange(16) % 2
    record = Record()
    with Trainer(
        model=ClassificationModel(nn.Linear(4, 2).double(), 2),
        train_dataloader=TensorLoader(images, targets, batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        algorithms=[SAM(rho=0.5)],
        callbacks=[record],
        max_duration="2ep",
        device="cpu",
    ) as trainer:
        trainer.fit()
        for model, batch, gradients, _ in record.steps:
            expected = sam_gradients(model, lambda model, batch=batch: model.loss(model(batch), batch), 0.5)
            for gradient in expected:
                dist.all_reduce(gradient)
            torch.testing.assert_close(gradients, [gradient / 2 for gradient in expected])
    print(len(record.steps))


def test_each_rank_ascends_along_its_own_gradient(run_ranks):
    ranks = run_ranks(program_of("algorithms/test_sam", "compare_on_a_rank"))
    assert [rank.stdout.split()[-1] for rank in ranks] == ["4", "4"]
