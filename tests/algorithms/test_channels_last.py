from __future__ import annotations

import warnings

import pytest
import torch
from rank_runs import program_of
from torch import nn

from runner import Callback, ClassificationModel, Trainer
from runner.algorithms import BatchAugment, ChannelsLast
from runner.algorithms.channels_last import to_channels_last
from runner.data import TensorLoader


def is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_keeps_values_and_stores_each_pixel_as_a_whole():
    images = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    converted = to_channels_last(images)
    assert torch.equal(converted, images)
    assert torch.equal(converted.as_strided((120,), (1,)), images.permute(0, 2, 3, 1).flatten())
    for tensor in (torch.zeros(2), torch.zeros(2, 3, 4, 5, 6)):
        assert to_channels_last(tensor) is tensor


class Layouts(Callback):
    """Stores whether inputs are channels-last in training, evaluation and prediction."""

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}

    def before_forward(self, state, logger):
        self.seen["train"] = is_channels_last(state.microbatch[0])

    def eval_before_forward(self, state, logger):
        self.seen["eval"] = is_channels_last(state.batch[0])

    def predict_before_forward(self, state, logger):
        self.seen["predict"] = is_channels_last(state.batch[0])


def test_weights_and_batches_are_channels_last_in_all_loops(make_trainer, resnet):
    layouts = Layouts()
    images = torch.randn(4, 2, 4, 4, dtype=torch.float64)
    with make_trainer(ChannelsLast(), BatchAugment(), build=resnet, callbacks=[layouts]) as trainer:
        assert [type(algorithm) for algorithm in trainer.state.algorithms] == [BatchAugment, ChannelsLast]
        trainer.fit()
        trainer.predict([(images, torch.zeros(4, dtype=torch.int64))])
        conv = trainer.state.unwrapped_model.module.blocks[0].conv1
        assert is_channels_last(conv.weight)
        assert not conv.weight.is_contiguous()
    assert layouts.seen == {"train": True, "eval": True, "predict": True}


def test_channels_last_changes_training_only_by_rounding(train, resnet):
    torch.testing.assert_close(train(ChannelsLast(), build=resnet).gradients, train(build=resnet).gradients)


def train_on_a_rank() -> None:
    """Train with channels-last on this rank, with warnings as errors."""
    warnings.simplefilter("error")
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(32, 3))
    data = TensorLoader(torch.randn(8, 2, 4, 4), torch.zeros(8, dtype=torch.int64), batch_size=4, shuffle=False)
    with Trainer(
        model=ClassificationModel(net, 3),
        train_dataloader=data,
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        algorithms=ChannelsLast(),
        device="cpu",
    ) as trainer:
        trainer.fit()


@pytest.mark.slow
def test_two_ranks_train_with_channels_last_without_a_warning(run_ranks):
    run_ranks(program_of("algorithms/test_channels_last", "train_on_a_rank"))
