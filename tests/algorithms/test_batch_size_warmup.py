from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_runs import program_of
from torch import nn

from runner import Callback, ClassificationModel, LanguageModel, Trainer, get_global_rank
from runner.algorithms import BatchAugment, BatchSizeWarmup, LabelSmoothing, MixUp, SelectiveBackprop
from runner.algorithms.batch_size_warmup import scheduled_size
from runner.data import TensorLoader


def test_the_size_rises_linearly_to_the_whole_batch():
    sizes = [scheduled_size(progress / 100, 0.25, 0.5, 64) for progress in range(101)]
    assert sizes[0] == 16
    assert sizes[25] == 40
    assert set(sizes[50:]) == {64}
    assert sizes == sorted(sizes)
    assert scheduled_size(0.0, 0.01, 0.5, 8) == 1
    assert scheduled_size(0.0, 0.01, 0.0, 8) == 8


def test_training_uses_the_first_samples_of_each_batch(train):
    whole = train(max_duration="10ba").batches
    short = train(BatchSizeWarmup(0.25, 0.5), max_duration="10ba").batches
    assert [len(images) for images, _ in short] == [2, 3, 4, 6, 7] + [8] * 5
    for (images, targets), (all_images, all_targets) in zip(short, whole, strict=True):
        assert torch.equal(images, all_images[: len(images)])
        assert torch.equal(targets, all_targets[: len(images)])


@pytest.mark.parametrize("grad_accum", [1, 3])
def test_gradients_are_those_of_the_smaller_batch(train, make_trainer, grad_accum: int):
    record = train(BatchSizeWarmup(0.5), max_duration="1ba", grad_accum=grad_accum)
    model = make_trainer().state.unwrapped_model
    assert len(record.batches[0][0]) == 4
    model.loss(model(record.batches[0]), record.batches[0]).backward()
    torch.testing.assert_close(record.gradients[0], [p.grad for p in model.parameters()])


def test_a_warmup_without_smaller_batches_changes_nothing(train):
    plain = train().gradients
    for algorithm in (BatchSizeWarmup(1.0), BatchSizeWarmup(0.25, 0.0)):
        torch.testing.assert_close(train(algorithm).gradients, plain, rtol=0, atol=0)


def test_the_warmup_composes_with_selection_augmentation_and_mixing(make_trainer):
    selection = SelectiveBackprop(0.0, 1.0, interrupt=0)
    with make_trainer(MixUp(), LabelSmoothing(), BatchAugment(), selection, BatchSizeWarmup(duration=1.0)) as trainer:
        trainer.fit()
        assert len(trainer.state.batch[0]) == 3  # half of the 7 samples that the warm-up keeps
    with pytest.raises(ValueError, match="flip='alternating'"):
        make_trainer(BatchSizeWarmup(), BatchAugment(flip="alternating"))


@pytest.mark.parametrize("arguments", [{"start": 0}, {"start": 1.5}, {"duration": -0.1}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        BatchSizeWarmup(**arguments)


def test_a_resumed_run_is_bit_identical(check_resume):
    check_resume(lambda: [BatchSizeWarmup(duration=1.0)])


def count_tokens_on_a_rank() -> None:
    """Train on this rank, and compare the tokens of all ranks with the timestamp."""

    class Tokens(Callback):
        count = 0

        def after_train_batch(self, state, logger):
            if not state.batch_is_padding:
                self.count += state.batch[0].numel()

    tokens = torch.randint(9, (16, 8), generator=torch.Generator().manual_seed(0))
    for algorithm in (BatchSizeWarmup(1.0, 0.1), SelectiveBackprop(0.0, 1.0, keep=0.4, interrupt=0)):
        torch.manual_seed(0)
        callback = Tokens()
        # The ranks get 2 and 3 samples of a batch, and 0 and 1 of the last.
        loader = TensorLoader(tokens, tokens, batch_size=5, shuffle=False)
        with Trainer(
            model=LanguageModel(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))),
            train_dataloader=loader,
            optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
            max_duration="150tok",
            algorithms=[algorithm],
            callbacks=callback,
            device="cpu",
        ) as trainer:
            trainer.fit()
            counts = torch.tensor([callback.count, trainer.state.timestamp.batch])
            first, second = (torch.empty_like(counts) for _ in range(2))
            dist.all_gather([first, second], counts)
        assert trainer.state.timestamp.token == first[0] + second[0] >= 150, get_global_rank()
        assert first[1] == second[1]


@pytest.mark.slow
def test_ranks_with_batches_of_unequal_size_agree_on_the_number_of_tokens(run_ranks):
    run_ranks(program_of("algorithms/test_batch_size_warmup", "count_tokens_on_a_rank"), 2)


def train_on_a_rank() -> None:
    """Train on this rank, and compare the first step with that of the kept samples of both ranks."""

    class Sizes(Callback):
        def __init__(self):
            self.seen = []

        def batch_start(self, state, logger):
            self.seen.append(len(state.batch[0]))

    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    data = torch.randn(32, 3, dtype=torch.float64), torch.arange(32) % 2
    loader = TensorLoader(*data, batch_size=16, shuffle=False)
    sizes = Sizes()
    with Trainer(
        model=ClassificationModel(net, 2),
        train_dataloader=loader,
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        max_duration="4ba",
        algorithms=[BatchSizeWarmup(0.5, 0.5), SelectiveBackprop(0.5, 1.0, keep=0.25, interrupt=0)],
        callbacks=sizes,
        device="cpu",
    ) as trainer:
        first = net.weight.detach().clone().requires_grad_()
        bias = net.bias.detach().clone()
        trainer.fit(duration="1ba")
        # Rank 0 has samples 0 to 7 of the first batch and rank 1 has 8 to 15; each keeps its first half.
        kept = [*range(4), *range(8, 12)]
        loss = nn.functional.cross_entropy(nn.functional.linear(data[0][kept], first, bias), data[1][kept])
        expected = first.detach() - 0.1 * torch.autograd.grad(loss, first)[0]
        torch.testing.assert_close(net.weight.detach(), expected)
        trainer.fit(duration="3ba")
        weights = [torch.zeros_like(net.weight) for _ in range(2)]
        dist.all_gather(weights, net.weight.detach())
        assert torch.equal(weights[0], weights[1])
        assert sizes.seen[0] == 4, sizes.seen
        assert sizes.seen[-1] == 2, sizes.seen


@pytest.mark.slow
def test_ranks_keep_the_same_fraction_of_samples_and_equal_weights(run_ranks):
    run_ranks(program_of("algorithms/test_batch_size_warmup", "train_on_a_rank"))
