"""Torch's losses that average over targets: microbatches and evaluations in parts equal the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner import Callback, ClassificationModel, SupervisedModel, Trainer
from runner.algorithms import CutMix, LabelSmoothing, MixUp
from runner.data import TensorLoader
from runner.models.target_mean import TargetMean, read_loss

VOID = 255
WEIGHTS = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def images(void: int = VOID) -> tuple[Tensor, Tensor]:
    """Return eight images with void pixels; one is all void, and one has only pixels of the class with weight 0."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 3, 4, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (8, 4, 4), generator=generator)
    targets[torch.rand(8, 4, 4, generator=generator) < 0.4] = void
    targets[2] = void
    targets[5] = 0
    return inputs, targets


class Reductions(TorchDispatchMode):
    """Records the reduction of each call of nll_loss2d: 0 for none, 1 for the mean, 2 for the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.reductions: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name().startswith("aten::nll_loss2d"):
            arguments = zip(function._schema.arguments, args, strict=False)
            self.reductions += [value for argument, value in arguments if argument.name == "reduction"]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHTS.float()])
def test_pixel_losses_are_summed_in_a_fixed_order_with_the_gradients_of_torch(weight: Any, smoothing: float):
    """On CUDA the sum and the mean of nll_loss2d have no fixed order."""
    inputs, targets = images()
    logits = inputs.float().requires_grad_()
    loss_fn = nn.CrossEntropyLoss(weight=weight, ignore_index=VOID, label_smoothing=smoothing)
    mean: Any = read_loss(loss_fn)
    with Reductions() as record:
        loss = mean(logits, targets)
        loss.backward()
    assert record.reductions == [0, 0]
    gradient, logits.grad = logits.grad, None
    options: dict[str, Any] = {"weight": weight, "ignore_index": VOID, "label_smoothing": smoothing}
    expected = F.cross_entropy(logits, targets, **options, reduction="sum") / mean.weight_of(targets)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=2**-22, atol=0)
    torch.testing.assert_close(gradient, logits.grad, rtol=0, atol=0)


class KeepGradient(Callback):
    """Copies the gradient of the last batch."""

    def after_train_batch(self, state, logger):
        gradients = [parameter.grad for parameter in state.unwrapped_model.parameters()]
        self.gradient = [gradient.clone() for gradient in gradients if gradient is not None]


def train(model: SupervisedModel, data: tuple[Tensor, ...], eval_batch_size: int, **options: Any) -> tuple[Any, Tensor]:
    """Return the gradient of one batch of all samples, and the loss of an evaluation."""
    callback = KeepGradient()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*data, batch_size=8, shuffle=False),
        eval_dataloader=TensorLoader(*data, batch_size=eval_batch_size, shuffle=False),
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        callbacks=[callback],
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return callback.gradient, trainer.state.eval_metric_values["eval"]["loss"]


LOSSES: dict[str, Any] = {
    "void": nn.CrossEntropyLoss(ignore_index=VOID),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=VOID),
    "smoothed": nn.CrossEntropyLoss(weight=WEIGHTS + 0.1, ignore_index=VOID, label_smoothing=0.1),
    "partial": partial(F.cross_entropy, weight=WEIGHTS, ignore_index=VOID),
}


@pytest.mark.parametrize("split", [{}, {"grad_accum": 3}, {"microbatch_size": 1}], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_void_pixels_and_class_weights_give_the_mean_of_the_whole_batch_in_any_parts(name: str, split: dict[str, Any]):
    model = SupervisedModel(seeded(lambda: nn.Conv2d(3, 3, 1)), LOSSES[name])
    inputs, targets = images()
    whole = LOSSES[name](model.module(inputs), targets)
    expected = torch.autograd.grad(whole, list(model.module.parameters()))
    for size in (1, 3, 8):
        gradient, loss = train(model, (inputs, targets), size, **split)
        torch.testing.assert_close(gradient, [*expected], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=1e-14)


def test_a_classifier_weights_samples_like_its_loss_function():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(8, 3, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, -100, 2, 2, 1, -100])
    for loss_fn in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=WEIGHTS)):
        model = ClassificationModel(seeded(lambda: nn.Linear(3, 3)), 3, loss_fn=loss_fn)
        whole = loss_fn(model.module(data[0]), data[1])
        expected = torch.autograd.grad(whole, list(model.module.parameters()))
        gradient, loss = train(model, data, 3, grad_accum=5)
        torch.testing.assert_close(gradient, [*expected], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_each_distribution_of_probabilities_has_weight_1(smoothing: float):
    targets = torch.tensor([0, 1, 2, 2])
    probabilities = F.one_hot(targets, 3).double() * (1 - smoothing) + smoothing / 3
    mean = TargetMean(F.cross_entropy, F.cross_entropy)
    assert mean.weight_of(probabilities) == 4 and mean.weight_of(torch.ones(2, 3, 5)) == 10
    outputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(mean(outputs, probabilities), F.cross_entropy(outputs, probabilities))


def test_read_loss_tells_means_over_targets_and_samples_from_unknown_losses():
    class Subclass(nn.CrossEntropyLoss):
        def forward(self, input, target):
            return super().forward(input, target) + 1

    over_targets = [nn.CrossEntropyLoss(), nn.NLLLoss(WEIGHTS), F.nll_loss, partial(F.cross_entropy, weight=WEIGHTS)]
    assert all(isinstance(read_loss(loss), TargetMean) for loss in over_targets)
    pos_weight = nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS)
    over_samples = [pos_weight, F.mse_loss, nn.KLDivLoss(reduction="batchmean"), partial(F.huber_loss, delta=2.0)]
    assert all(read_loss(loss) == "samples" for loss in over_samples)
    sums: list[Any] = [loss(reduction="sum") for loss in (nn.MSELoss, nn.CrossEntropyLoss)]
    sums += [partial(F.cross_entropy, reduction="sum")]
    unknown = [*sums, Subclass(), partial(F.mse_loss, size_average=False), lambda outputs, targets: outputs.mean()]
    assert all(read_loss(loss) is None for loss in unknown)


def test_loss_averages_depends_on_the_loss_function_and_overridden_methods():
    class Overridden(SupervisedModel):
        def loss(self, outputs, batch):
            return outputs.mean()

    class Declared(Overridden):
        def loss_weight(self, batch):
            return len(batch[0]) * 3

    network = nn.Linear(3, 3)
    assert ClassificationModel(network, 3).loss_averages == "samples"
    assert ClassificationModel(network, 3, nn.CrossEntropyLoss()).loss_averages == "weights"
    assert SupervisedModel(network, nn.MSELoss()).loss_averages == "samples"
    assert SupervisedModel(network, nn.MSELoss(reduction="sum")).loss_averages == "unknown"
    assert Overridden(network, nn.CrossEntropyLoss()).loss_averages == "unknown"
    assert Declared(network, nn.CrossEntropyLoss()).loss_averages == "weights"
    assert Overridden(network, nn.CrossEntropyLoss()).loss_weight((torch.ones(5, 3), torch.ones(5))) == 5


@pytest.mark.parametrize("split", [{}, {"grad_accum": 3}, {"microbatch_size": 1}], ids=str)
@pytest.mark.parametrize("weight", [None, WEIGHTS + 0.1], ids=["void", "class weights"])
@pytest.mark.parametrize("is_module", [True, False])
def test_label_smoothing_equals_torchs_with_void_pixels_and_class_weights_in_any_split(
    weight: Tensor | None, is_module: bool, split: dict[str, Any]
):
    options: dict[str, Any] = {"weight": weight, "ignore_index": VOID}
    loss_fn = nn.CrossEntropyLoss(**options) if is_module else partial(F.cross_entropy, **options)
    model = SupervisedModel(seeded(lambda: nn.Conv2d(3, 3, 1)), loss_fn)
    inputs, targets = images()
    whole = F.cross_entropy(model.module(inputs), targets, **options, label_smoothing=0.2)
    expected = torch.autograd.grad(whole, list(model.module.parameters()))
    gradient, loss = train(model, (inputs, targets), 3, algorithms=LabelSmoothing(0.2), **split)
    torch.testing.assert_close(gradient, [*expected], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(loss, loss_fn(model.module(inputs), targets).detach(), rtol=1e-12, atol=1e-14)
    assert model.loss_fn is loss_fn


@pytest.mark.parametrize("mixing", [MixUp, CutMix])
def test_mixing_with_class_weights_is_refused_only_in_microbatches(mixing: Callable[[], Any]):
    data = torch.randn(8, 3, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 1, 2])
    flat = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).double()
    weighted = ClassificationModel(flat, 3, loss_fn=nn.CrossEntropyLoss(weight=WEIGHTS))
    with pytest.raises(ValueError, match=r"class weights or an ignore_index make the gradient depend on how"):
        train(weighted, data, 8, algorithms=mixing(), grad_accum=2)
    train(weighted, data, 8, algorithms=mixing())
    train(ClassificationModel(flat, 3, loss_fn=nn.CrossEntropyLoss()), data, 8, algorithms=mixing(), grad_accum=2)
