from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_runs import program_of
from torch import nn

from runner import Callback, ClassificationModel, LanguageModel, Model, Trainer, save_checkpoint
from runner.algorithms import BatchAugment, CutOut, LabelSmoothing, MixUp, SelectiveBackprop
from runner.algorithms._batch import pick_samples
from runner.algorithms.selective_backprop import draw_ranks, evaluate_losses, select
from runner.data import TensorLoader
from runner.models import GPT
from runner.models.sample_losses import sample_losses


def test_ranks_of_high_losses_are_more_likely():
    draws = torch.stack([draw_ranks(8, 0.5, seed) for seed in range(4000)])
    assert draws.shape == (4000, 4)
    assert all(len(set(draw.tolist())) == 4 for draw in draws[:100])
    counts = draws.flatten().bincount(minlength=8).double()
    assert (counts.diff() > 0).all()
    # If one sample is kept, its probability is proportional to q^(1 / keep - 1), with q = 1/6, 3/6 and 5/6 here.
    single = torch.stack([draw_ranks(3, 1 / 3, seed) for seed in range(6000)]).flatten().bincount(minlength=3) / 6000
    torch.testing.assert_close(single.double(), torch.tensor([1.0, 9.0, 25.0]).double() / 35, atol=0.02, rtol=0)


@pytest.mark.parametrize(("keep", "kept"), [(1.0, 8), (0.5, 4), (0.4, 3), (0.01, 1)])
def test_the_number_of_kept_samples_is_rounded_down(keep: float, kept: int):
    assert len(draw_ranks(8, keep, 0)) == kept


def test_selected_samples_keep_the_order_of_the_batch():
    losses = torch.tensor([0.3, 0.1, 0.9, 0.5])
    assert select(losses, torch.tensor([3, 1])).tolist() == [0, 2]
    assert select(losses, torch.tensor([0, 1, 2, 3])).tolist() == [0, 1, 2, 3]


def test_losses_of_samples_equal_those_of_batches_of_one():
    torch.manual_seed(0)
    classifier = ClassificationModel(nn.Linear(5, 3), 3)
    batch = (torch.randn(6, 5), torch.tensor([0, 1, 2, 0, -100, 1]))
    counted = [0, 1, 2, 3, 5]  # torch's own mean over nothing is NaN
    losses = sample_losses(classifier, classifier(batch), batch)[counted]
    torch.testing.assert_close(losses, F.cross_entropy(classifier(batch), batch[1], reduction="none")[counted])

    tokens = torch.randint(9, (4, 8))
    targets = tokens.roll(-1, dims=1).where(torch.rand(4, 8) < 0.7, -100)
    model = LanguageModel(GPT(vocab_size=9, context=8, d_model=8, n_layers=1, n_heads=2))
    batch = (tokens, targets)
    losses = sample_losses(model, model(batch), batch)
    expected = [model.loss(model((tokens[i : i + 1],)), (tokens[i : i + 1], targets[i : i + 1])) for i in range(4)]
    torch.testing.assert_close(losses, torch.stack(expected))


class TwoLosses(Model):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 1)

    def forward(self, batch):
        return {"prediction": self.net(batch["inputs"])}

    def loss(self, outputs, batch):
        error = outputs["prediction"][:, 0] - batch["targets"]
        return {"square": error.square().mean(), "absolute": error.abs().mean()}


def test_several_losses_are_combined_as_in_training():
    model = TwoLosses()
    batch = {"inputs": torch.randn(4, 5), "targets": torch.randn(4)}
    error = model(batch)["prediction"][:, 0] - batch["targets"]
    losses = sample_losses(model, model(batch), batch)
    torch.testing.assert_close(losses, error.square() + error.abs())
    gradients = [torch.autograd.grad(values.sum(), model.net.weight) for values in (losses, error**2 + error.abs())]
    torch.testing.assert_close(*gradients)


class Losses(Callback):
    """Stores the number of trained samples of each batch, and the ratio of their mean loss to that of the batch."""

    def __init__(self):
        self.sizes, self.ratios = [], []

    def batch_start(self, state, logger):
        trained = evaluate_losses(state, state.batch)
        now = state.timestamp
        loader: Any = state.train_dataloader
        indices = loader.order.indices(now.epoch, now.batch_in_epoch)
        whole = evaluate_losses(state, tuple(part[indices] for part in loader.tensors))
        self.sizes.append(len(trained))
        self.ratios.append((trained.mean() / whole.mean()).item())


def test_high_losses_are_selected_between_start_and_end_except_in_each_third_batch(make_trainer):
    losses = Losses()
    algorithm = SelectiveBackprop(0.25, 0.75, keep=0.5, interrupt=3)
    with make_trainer(algorithm, callbacks=[losses], max_duration="40ba") as trainer:
        trainer.fit()
    expected = [4 if 10 <= batch < 30 and (batch + 1) % 3 else 8 for batch in range(40)]
    assert losses.sizes == expected
    ratios = [ratio for ratio, size in zip(losses.ratios, losses.sizes, strict=True) if size == 4]
    assert sum(ratios) > 1.05 * len(ratios)
    assert trainer.state.timestamp.sample == 40 * 8


def test_gradients_are_those_of_the_selected_samples(train, make_trainer):
    record = train(SelectiveBackprop(0.0, 1.0, interrupt=0), max_duration="1ba")
    model = make_trainer().state.unwrapped_model
    images, targets = record.batches[0]
    assert len(images) == len(targets) == 4
    model.loss(model(record.batches[0]), record.batches[0]).backward()
    torch.testing.assert_close(record.gradients[0], [p.grad for p in model.parameters()])


def test_losses_are_those_of_an_evaluation(make_trainer):
    with make_trainer(batch_norm=True) as trainer:
        trainer.fit()
        model, batch = trainer.state.unwrapped_model, trainer.state.batch
        before = {name: value.clone() for name, value in model.state_dict().items()}
        losses = evaluate_losses(trainer.state, batch)
        assert model.training
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
        expected = F.cross_entropy(model.eval()(batch), batch[1], reduction="none")
        torch.testing.assert_close(losses, expected.detach())
        assert not losses.requires_grad


@pytest.mark.parametrize("index", [torch.tensor([0, 2]), slice(0, 3, 2)])
def test_texts_are_selected_with_their_samples_and_class_names_stay(index: Any):
    batch = {"x": torch.arange(3), "names": ["a", "b", "c"], "classes": ("cat", "dog")}
    picked = pick_samples(batch, 3, index)
    assert picked["x"].tolist() == [0, 2] and picked["names"] == ["a", "c"] and picked["classes"] == ("cat", "dog")


@pytest.mark.parametrize("index", [torch.tensor([0, 2]), slice(0, 3, 2)])
def test_samples_are_selected_from_lists(index: Any):
    images, targets = [torch.zeros(3, size) for size in (4, 5, 6)], [{"boxes": torch.zeros(size)} for size in (1, 2, 3)]
    picked = pick_samples((images, targets), 3, index)
    assert [id(sample) for part in picked for sample in part] == [
        id(part[index]) for part in (images, targets) for index in (0, 2)
    ]


@pytest.mark.parametrize("batch_norm", [True, False])
def test_evaluating_losses_changes_nothing(train, batch_norm: bool):
    plain = train(batch_norm=batch_norm).gradients
    whole = train(SelectiveBackprop(0.0, 1.0, keep=1.0, interrupt=0), batch_norm=batch_norm).gradients
    torch.testing.assert_close(whole, plain, rtol=0, atol=0)


def test_samples_may_be_selected_by_losses_of_smaller_images(train, resnet):
    small = train(SelectiveBackprop(0.0, 1.0, scale_factor=0.5, interrupt=0), build=resnet).batches
    assert {tuple(images.shape) for images, _ in small} == {(4, 2, 4, 4)}


def test_smaller_images_may_be_in_bfloat16(train, resnet):
    images, targets = torch.randn(24, 2, 4, 4).bfloat16(), torch.arange(24) % 3
    arguments: dict[str, Any] = {
        "build": lambda: resnet().bfloat16(),
        "train_dataloader": TensorLoader(images, targets, batch_size=8, shuffle=True),
        "eval_dataloader": None,
    }
    small = train(SelectiveBackprop(0.0, 1.0, scale_factor=0.5, interrupt=0), **arguments).batches
    assert {(tuple(images.shape), images.dtype) for images, _ in small} == {((4, 2, 4, 4), torch.bfloat16)}


def test_selection_runs_before_augmentation_and_composes_with_mixing(make_trainer):
    selection = SelectiveBackprop(0.0, 1.0, interrupt=0)
    with make_trainer(LabelSmoothing(), MixUp(), CutOut(), BatchAugment(), selection, grad_accum=2) as trainer:
        names = [type(algorithm).__name__ for algorithm in trainer.state.algorithms]
        assert names.index("SelectiveBackprop") < min(names.index("CutOut"), names.index("BatchAugment"))
        trainer.fit()
        assert trainer.state.batch[0].shape == (4, 2, 4, 4)


def test_alternating_flips_are_refused(make_trainer):
    with pytest.raises(ValueError, match="flip='alternating'"):
        make_trainer(SelectiveBackprop(), BatchAugment(flip="alternating"))


@pytest.mark.parametrize(
    "arguments",
    [{"start": -0.1}, {"end": 0.5}, {"end": 1.1}, {"keep": 0}, {"scale_factor": 1.5}, {"interrupt": -1}],
)
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        SelectiveBackprop(**arguments)


def test_a_resumed_run_is_bit_identical(check_resume):
    check_resume(lambda: [SelectiveBackprop(0.0, 0.9, interrupt=3)], batch_norm=True)


def compare_on_a_rank() -> None:
    """Train on this rank with evaluations, and with a resume, and compare the weights with those of a plain run."""

    def fit(duration="12ba", **arguments):
        torch.manual_seed(0)
        images, targets = torch.randn(64, 6), torch.arange(64) % 3
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        with Trainer(
            model=ClassificationModel(net, 3),
            train_dataloader=TensorLoader(images, targets, batch_size=16, shuffle=True),
            eval_dataloader=TensorLoader(images, targets, batch_size=16, shuffle=False),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
            algorithms=[SelectiveBackprop(0.0, 1.0, interrupt=0)],
            max_duration="12ba",
            device="cpu",
            **arguments,
        ) as trainer:
            trainer.fit(duration=duration)
            if duration == "5ba":
                save_checkpoint(trainer.state, "checkpoint")
        return [parameter.detach().clone() for parameter in net.parameters()]

    whole = fit(eval_interval=0)
    torch.testing.assert_close(fit(eval_interval="1ba"), whole, rtol=0, atol=0)
    fit("5ba", eval_interval=0)
    resumed = fit("7ba", eval_interval=0, resume_path="checkpoint")
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.mark.slow
def test_two_ranks_train_alike_with_evaluations_and_after_a_resume(run_ranks):
    run_ranks(program_of("algorithms/test_selective_backprop", "compare_on_a_rank"))
