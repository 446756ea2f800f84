"""Epochs of different lengths: each epoch reads a pool that has grown since the previous one."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import SAMPLES, make_trainer
from rank_runs import program_of

from runner import Callback, ClassificationModel, save_checkpoint
from runner.algorithms import GyroDropout
from runner.callbacks import InMemoryLogger, LRMonitor
from runner.callbacks._remaining import batches_in_run
from runner.data import Replicated, Sharded
from runner.distributed.ranks import get_global_rank
from runner.optim.schedulers import cosine_annealing, linear

EPOCHS = 4


class GrowingPool:
    """Two batches in the first epoch, and two more in each later epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 * (self.epoch + 1)

    def __iter__(self) -> Any:
        for batch in range(len(self)):
            yield torch.full((SAMPLES, 3), batch / 10), torch.arange(SAMPLES) % 2


class LabeledPool(Callback):
    """A pool that a callback enlarges after each epoch, as in active learning; its size is part of the run's state."""

    size = 2

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        pool = GrowingPool()
        pool.set_epoch(self.size // 2 - 1)
        return iter(pool)

    def epoch_end(self, state, logger):
        self.size += 2

    def state_dict(self):
        return {"size": self.size}

    def load_state_dict(self, state):
        self.size = state["size"]


class Lengths(Callback):
    """Records the length of the epoch that each batch belongs to."""

    def __init__(self) -> None:
        self.lengths: list[int | None] = []

    def batch_start(self, state, logger):
        self.lengths.append(state.train_dataloader_len)


def rates_of(schedule: Any, **arguments: Any) -> list[float]:
    """Return the learning rates of all batches, relative to the optimizer's."""
    memory = InMemoryLogger()
    arguments = {"max_duration": f"{EPOCHS}ep", "train_dataloader": GrowingPool(), **arguments}
    with make_trainer(LRMonitor(), schedulers=schedule, loggers=[memory], **arguments) as trainer:
        trainer.fit()
    (key,) = [key for key in memory.data if key.startswith("lr-")]
    return [10 * value for _, value in memory.data[key]]  # the optimizer's rate is 0.1


def test_each_epoch_has_the_length_of_its_loader_at_its_start():
    callback = Lengths()
    with make_trainer(callback, train_dataloader=GrowingPool(), max_duration=f"{EPOCHS}ep") as trainer:
        trainer.fit()
        assert callback.lengths == [2] * 2 + [4] * 4 + [6] * 6 + [8] * 8
        assert trainer.state.timestamp.batch == 20 and trainer.state.timestamp.epoch == EPOCHS


def test_a_cosine_schedule_spans_all_epochs_of_any_lengths(caplog):
    rates = rates_of(cosine_annealing())
    positions = [
        (epoch + batch / (2 * epoch + 2)) / EPOCHS for epoch in range(EPOCHS) for batch in range(2 * epoch + 2)
    ]
    assert rates == pytest.approx([(1 + math.cos(math.pi * position)) / 2 for position in positions])
    assert not caplog.records


def test_a_warm_up_in_batches_keeps_its_length_in_a_run_in_epochs_and_warns_once(caplog):
    with caplog.at_level(logging.WARNING, "runner"):
        rates = rates_of(cosine_annealing(t_warmup="4ba"))
    assert rates[:4] == pytest.approx([0, 0.25, 0.5, 0.75]) and max(rates) <= 1
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] < 0.01
    (record,) = caplog.records
    assert "t_warmup" in record.getMessage() and "give them and max_duration in one unit" in record.getMessage()


def test_a_schedule_and_a_run_in_batches_do_not_depend_on_the_lengths_of_epochs(caplog):
    assert rates_of(linear(t_max="10ba"), max_duration="20ba") == pytest.approx(
        [1 - min(n, 10) / 10 for n in range(20)]
    )
    assert not caplog.records


def test_an_interval_of_an_eighth_of_four_epochs_evaluates_twice_in_each():
    evaluated: list[int] = []

    class Evaluations(Callback):
        def eval_after_all(self, state, logger):
            evaluated.append(state.timestamp.batch)

    arguments = {"eval_dataloader": GrowingPool(), "eval_interval": "0.125dur", "max_duration": f"{EPOCHS}ep"}
    with make_trainer(Evaluations(), train_dataloader=GrowingPool(), **arguments) as trainer:
        trainer.fit()
    assert evaluated == [1, 2, 4, 6, 9, 12, 16, 20]


def test_the_expected_number_of_batches_assumes_the_length_of_this_epoch_for_later_epochs():
    expected: list[int | None] = []

    class Progress(Callback):
        def batch_end(self, state, logger):
            expected.append(batches_in_run(state))

    with make_trainer(Progress(), train_dataloader=GrowingPool(), max_duration=f"{EPOCHS}ep") as trainer:
        trainer.fit()
    assert expected == [8] * 2 + [14] * 4 + [18] * 6 + [20] * 8


class Saver(Callback):
    """Saves a checkpoint after each of these batches, in a folder with the batch's number."""

    def __init__(self, folder: Path, *batches: int) -> None:
        self.folder = folder
        self.batches = batches

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch in self.batches:
            save_checkpoint(state, self.folder / str(state.timestamp.batch))


def train_on(pool: Any, *callbacks: Callback, **arguments: Any) -> dict[str, Any]:
    """Train on a pool, and return the lengths of the batches' epochs, the logged values and the weights."""
    lengths, memory = Lengths(), InMemoryLogger()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
    pools = [pool] if isinstance(pool, Callback) else []
    with make_trainer(
        *(*pools, lengths, LRMonitor(), *callbacks),
        model=ClassificationModel(network, 2),
        train_dataloader=pool,
        eval_dataloader=Replicated(GrowingPool()),
        eval_interval="0.125dur",
        schedulers=cosine_annealing(t_warmup="3ba"),
        max_duration=f"{EPOCHS}ep",
        algorithms=[GyroDropout(sigma=4, tau=1)],
        loggers=[memory],
        **arguments,
    ) as trainer:
        trainer.fit()
        weights = [parameter.detach().clone() for parameter in trainer.state.unwrapped_model.parameters()]
    values = {
        key: [(now.batch, value) for now, value in entries]
        for key, entries in memory.data.items()
        if key.startswith(("lr", "loss", "metrics"))
    }
    return {"lengths": lengths.lengths, "values": values, "weights": weights}


@pytest.mark.parametrize("make", [GrowingPool, LabeledPool])
def test_a_run_resumed_at_any_batch_has_the_lengths_and_values_of_the_whole_run(tmp_path: Path, make: Any):
    batches = (1, 2, 9, 12, 13)  # epochs end after batches 2, 6, 12 and 20
    whole = train_on(make(), Saver(tmp_path, *batches))
    for batch in batches:
        resumed = train_on(make(), Saver(tmp_path), resume_path=tmp_path / str(batch))
        assert resumed["lengths"] == whole["lengths"][batch:], batch
        for key, values in resumed["values"].items():
            assert values == whole["values"][key][-len(values) :] and values[0][0] >= batch, (batch, key)
        torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=0)


class RankPool(GrowingPool):
    """This rank's half of the samples of each batch of the pool; rank 1 has one batch less."""

    def __len__(self) -> int:
        return super().__len__() - get_global_rank()

    def __iter__(self) -> Any:
        for inputs, targets in super().__iter__():
            yield inputs[get_global_rank() :: 2], targets[get_global_rank() :: 2]


def on_ranks() -> None:
    outcome = train_on(Sharded(RankPool()))
    assert outcome["lengths"] == [2] * 2 + [4] * 4 + [6] * 6 + [8] * 8
    torch.save(outcome["weights"], f"weights{get_global_rank()}.pt")


def test_ranks_agree_on_the_length_of_each_epoch(tmp_path: Path, run_ranks: Any):
    run_ranks(program_of("training/test_loop_lengths", "on_ranks"), 2)
    torch.testing.assert_close(*(torch.load(tmp_path / f"weights{rank}.pt") for rank in (0, 1)), rtol=0, atol=0)
