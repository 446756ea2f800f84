from __future__ import annotations

import pytest
import torch

from runner.algorithms import BatchAugment, BatchSizeWarmup, LabelSmoothing, MixUp, SelectiveBackprop
from runner.algorithms.batch_size_warmup import scheduled_size


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
    some = train(BatchSizeWarmup(0.25, 0.5), max_duration="10ba").batches
    assert [len(images) for images, _ in some] == [2, 3, 4, 6, 7] + [8] * 5
    for few, all_of_them in zip(some, whole, strict=True):
        assert all(
            torch.equal(part, everything[: len(part)]) for part, everything in zip(few, all_of_them, strict=True)
        )


@pytest.mark.parametrize("grad_accum", [1, 3])
def test_gradients_are_those_of_the_smaller_batch(train, make_trainer, grad_accum: int):
    gradients = train(BatchSizeWarmup(0.5), max_duration="1ba", grad_accum=grad_accum)
    model = make_trainer().state.unwrapped_model
    assert len(gradients.batches[0][0]) == 4
    model.loss(model(gradients.batches[0]), gradients.batches[0]).backward()
    torch.testing.assert_close(gradients.seen[0], [p.grad for p in model.parameters()])


def test_a_warm_up_of_no_length_changes_nothing(train):
    plain = train().seen
    for algorithm in (BatchSizeWarmup(1.0), BatchSizeWarmup(0.25, 0.0)):
        torch.testing.assert_close(train(algorithm).seen, plain, rtol=0, atol=0)


def test_it_composes_with_selection_augmentation_and_mixing(make_trainer):
    selection = SelectiveBackprop(0.0, 1.0, interrupt=0)
    with make_trainer(MixUp(), LabelSmoothing(), BatchAugment(), selection, BatchSizeWarmup(duration=1.0)) as trainer:
        trainer.fit()
        assert len(trainer.state.batch[0]) == 3  # half of 7, of a batch of 8
    with pytest.raises(ValueError, match="flip='alternating'"):
        make_trainer(BatchSizeWarmup(), BatchAugment(flip="alternating"))


@pytest.mark.parametrize("arguments", [{"start": 0}, {"start": 1.5}, {"duration": -0.1}])
def test_arguments_are_checked(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        BatchSizeWarmup(**arguments)


def test_resume(check_resume):
    check_resume(lambda: [BatchSizeWarmup(duration=1.0)])


@pytest.mark.slow
def test_ranks_of_unequal_shares_agree_on_tokens(run_ranks):
    def program():
        import torch
        import torch.distributed as dist
        from torch import nn

        from runner import Callback, LanguageModel, Trainer, get_global_rank
        from runner.algorithms import BatchSizeWarmup, SelectiveBackprop
        from runner.data import TensorLoader

        class Tokens(Callback):
            mine = 0

            def after_train_batch(self, state, logger):
                if not state.batch_is_padding:
                    self.mine += state.batch[0].numel()

        tokens = torch.randint(9, (16, 8), generator=torch.Generator().manual_seed(0))
        for algorithm in (BatchSizeWarmup(1.0, 0.1), SelectiveBackprop(0.0, 1.0, keep=0.4, interrupt=0)):
            torch.manual_seed(0)
            counted = Tokens()
            with Trainer(
                model=LanguageModel(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))),
                train_dataloader=TensorLoader(
                    tokens, tokens, batch_size=5, shuffle=False
                ),  # 2 and 3 on the ranks, 0 and 1 in the last batch
                optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
                max_duration="150tok",
                algorithms=[algorithm],
                callbacks=counted,
                device="cpu",
            ) as trainer:
                trainer.fit()
                trained = torch.tensor([counted.mine, trainer.state.timestamp.batch])
                every = [torch.empty_like(trained) for _ in range(2)]
                dist.all_gather(every, trained)
            assert trainer.state.timestamp.token == every[0][0] + every[1][0] >= 150, get_global_rank()
            assert every[0][1] == every[1][1]

    run_ranks(program, 2)


@pytest.mark.slow
def test_ranks_keep_the_same_fraction_and_train_alike(run_ranks):
    def program():
        import torch
        import torch.distributed as dist
        from torch import nn

        from runner import Callback, ClassificationModel, Trainer
        from runner.algorithms import BatchSizeWarmup, SelectiveBackprop
        from runner.data import TensorLoader

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
            # Of the first batch of 16, rank 0 has samples 0 to 7 and rank 1 has 8 to 15, of which the first half count.
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

    run_ranks(program)
