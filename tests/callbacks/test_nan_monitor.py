from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runner import Callback, ClassificationModel, Trainer, save_checkpoint
from runner.callbacks import CheckpointSaver, NaNMonitor
from runner.callbacks.nan_monitor import SLOTS
from runner.data import TensorLoader

BATCHES = 6  # per epoch


class Diverging(ClassificationModel):
    """Multiplies the loss by a factor after a number of batches."""

    def __init__(self, batches: int, factor: float):
        super().__init__(nn.Linear(5, 3), 3)
        self.batches, self.factor, self.trained = batches, factor, 0

    def loss(self, outputs, batch):
        self.trained += self.training
        return super().loss(outputs, batch) * (1.0 if self.trained <= self.batches else self.factor)


class Count(Callback):
    batches = 0

    def batch_start(self, state, logger):
        self.batches = state.timestamp.batch + 1


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    targets = torch.arange(24) % 3
    defaults: dict[str, Any] = {
        "train_dataloader": TensorLoader(torch.randn(24, 5), targets, batch_size=24 // BATCHES, shuffle=True),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.0),
        "max_duration": "3ep",
        "callbacks": callbacks,
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("batch", [1, 4, BATCHES, BATCHES + 1, 3 * BATCHES])
def test_the_run_ends_at_the_first_loss_that_is_not_finite(value: float, batch: int):
    count = Count()
    with (
        pytest.raises(FloatingPointError) as caught,
        make_trainer(count, NaNMonitor(), model=Diverging(batch - 1, value)) as trainer,
    ):
        trainer.fit()
    epoch = 1 + (batch - 1) // BATCHES
    assert f"the loss is {value} on rank 0, epoch {epoch}, batch {batch} (both from 1)" in str(caught.value)
    assert count.batches == batch


def test_a_large_finite_loss_is_no_error():
    with make_trainer(NaNMonitor(), model=Diverging(3, 1e30)) as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == 3 * BATCHES > 0


def test_no_checkpoint_is_saved_after_a_loss_that_is_not_finite(tmp_path):
    saver = CheckpointSaver("1ba", keep=-1)
    with (
        pytest.raises(FloatingPointError),
        make_trainer(NaNMonitor(), saver, model=Diverging(3, float("nan")), run_dir=tmp_path) as trainer,
    ):
        trainer.fit()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("ep*")) == ["ep0-ba1", "ep0-ba2", "ep0-ba3"]


def test_the_batch_in_the_error_of_a_resumed_run_counts_from_the_start_of_training(tmp_path):
    with make_trainer(NaNMonitor(), model=Diverging(99, 0)) as first:
        first.fit(duration="8ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    second = make_trainer(NaNMonitor(), model=Diverging(2, float("nan")), resume_path=tmp_path / "checkpoint")
    with pytest.raises(FloatingPointError, match="epoch 2, batch 11 "), second:
        second.fit()


def test_the_error_names_the_rank_of_the_first_loss_that_is_not_finite(run_ranks):
    def program():
        import torch
        from torch import nn

        from runner import ClassificationModel, Trainer
        from runner.callbacks import NaNMonitor
        from runner.data import TensorLoader

        # Each batch has one sample per rank; the second rank's sample of the fourth batch is NaN.
        inputs = torch.ones(12, 5)
        inputs[7] = float("nan")
        with Trainer(
            model=ClassificationModel(nn.Linear(5, 3), 3),
            train_dataloader=TensorLoader(inputs, torch.arange(12) % 3, batch_size=2, shuffle=False),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
            max_duration="2ep",
            device="cpu",
            callbacks=[NaNMonitor()],
        ) as trainer:
            trainer.fit()

    for rank in run_ranks(program, check=False):
        assert rank.returncode
        assert "FloatingPointError: the loss is nan on rank 1, epoch 1, batch 4 (both from 1)" in rank.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4, BATCHES, 3 * BATCHES])
def test_on_a_gpu_training_stops_by_the_end_of_the_epoch(batch: int):
    count = Count()
    arguments = {"model": Diverging(batch - 1, float("nan")), "device": "cuda"}
    with (
        pytest.raises(FloatingPointError, match=f"batch {batch} "),
        make_trainer(count, NaNMonitor(), **arguments) as trainer,
    ):
        trainer.fit()
    assert batch <= count.batches <= -(-batch // BATCHES) * BATCHES


@pytest.mark.gpu
def test_the_host_waits_for_a_gpu_that_is_many_batches_behind():
    class Slow(Diverging):
        def forward(self, batch):
            torch.cuda._sleep(10_000_000)
            return super().forward(batch)

    inputs, targets = torch.randn(1000, 5), torch.arange(1000) % 3
    loader = TensorLoader(inputs, targets, batch_size=2, shuffle=False)
    arguments = {"model": Slow(150, float("nan")), "device": "cuda", "train_dataloader": loader}
    count = Count()
    with (
        pytest.raises(FloatingPointError, match="batch 151 "),
        make_trainer(count, NaNMonitor(), **arguments) as trainer,
    ):
        trainer.fit()
    assert count.batches <= 151 + SLOTS + 1
