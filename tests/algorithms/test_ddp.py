from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from rank_runs import program_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner import Callback, ClassificationModel, Model, Trainer, get_global_rank
from runner.algorithms import DDP
from runner.data import TensorLoader
from runner.distributed.collectives import destroy_process_group, init_process_group


def on_two_ranks() -> None:
    """Train with each option on this rank, and print on rank 0 whether DDP refuses unused parameters."""
    init_process_group(torch.device("cpu"))

    class Parts(nn.Module):
        """Uses its second and third layer together, or in turn from batch to batch."""

        def __init__(self, both: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)
            self.both = both
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.first(x).relu()
            if self.both:
                return self.second(x) + self.third(x)
            return self.second(x) if self.calls % 2 else self.third(x)

    class Wrapped(Callback):
        def after_train_batch(self, state, logger):
            assert isinstance(state.model, DistributedDataParallel)
            self.model = state.model

    def train(*algorithms: DDP, both: bool = True) -> tuple[torch.Tensor, DistributedDataParallel]:
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(32, 4, generator=generator), torch.arange(32) % 3
        wrapped = Wrapped()
        with Trainer(
            model=ClassificationModel(Parts(both), 3),
            train_dataloader=TensorLoader(*data, batch_size=8, shuffle=True),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
            max_duration="1ep",
            algorithms=algorithms,
            callbacks=[wrapped],
            device="cpu",
            progress_bar=False,
        ) as trainer:
            trainer.fit()
            trainer.fit("1ep")  # the hook must not be registered again
            weights = nn.utils.parameters_to_vector(trainer.state.unwrapped_model.parameters()).detach()
        weights_of_ranks = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(weights_of_ranks, weights)
        assert torch.equal(*weights_of_ranks)
        return weights, wrapped.model

    plain, _ = train()
    same, model = train(DDP(bucket_cap_mb=3, static_graph=True))
    assert torch.equal(same, plain) and model.bucket_bytes_cap == 3 << 20 and model.static_graph
    for name in ("bf16", "fp16"):
        compressed, _ = train(DDP(compress=name))
        error = (compressed - plain).abs().max()
        assert 0 < error < 2e-2, (name, error)
    weights, model = train(DDP(find_unused_parameters=True), both=False)
    assert model.find_unused_parameters and not torch.equal(weights, plain)
    if get_global_rank() == 0:
        try:
            train(both=False)
        except RuntimeError as error:
            print("Expected to have finished reduction" in str(error))
    else:
        try:
            train(both=False)
        except Exception as error:
            print(type(error).__name__, file=sys.stderr)
    destroy_process_group()


@pytest.mark.slow
def test_options_reach_ddp_and_only_compression_changes_weights(run_ranks):
    first, *_ = run_ranks(program_of("algorithms/test_ddp", "on_two_ranks"), 2)
    assert first.stdout.split() == ["True"]


def test_a_single_process_trains_as_without_ddp(train):
    gradients = train(DDP(compress="bf16"), max_duration="2ba").gradients
    torch.testing.assert_close(gradients, train(max_duration="2ba").gradients, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"compress": "fp8"}, "compress='fp8': must be one of None, 'bf16', 'fp16'"),
        (
            {"static_graph": True, "find_unused_parameters": True},
            "find_unused_parameters=True: does nothing with static_graph=True",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DDP(**arguments)


@pytest.mark.parametrize("arguments", [{"grad_accum": 2}, {"microbatch_size": 4}])
def test_a_static_graph_refuses_to_accumulate_gradients(make_trainer, arguments: dict):
    with pytest.raises(ValueError, match="static_graph=True: torch cannot accumulate gradients with it"):
        make_trainer(DDP(static_graph=True), **arguments)


def test_runs_whose_gradients_ddp_does_not_average_are_refused(make_trainer):
    class OwnStep(Model):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, batch):
            return self.layer(batch)

        def training_step(self, state):
            raise NotImplementedError

    with pytest.raises(ValueError, match="with microbatch_size='auto', gradients are averaged after backward"):
        make_trainer(DDP(), microbatch_size="auto")
    with pytest.raises(ValueError, match=r"with OwnStep\.training_step, gradients are averaged after backward"):
        make_trainer(DDP(), build=OwnStep)
