"""Loaders and batches that cannot be trained on are one clear error; numbers that are none are trained on."""

from __future__ import annotations

import pytest
import torch
from loop_runs import make_data, make_trainer

from callbacks import InMemoryLogger
from runner.data import TensorLoader


def test_a_loader_that_runs_dry_is_an_error():
    used_up = (batch for batch in make_data(2))
    with pytest.raises(ValueError, match="train_dataloader yielded no batch in this epoch") as raised:
        make_trainer(train_dataloader=used_up, max_duration="2ep").fit()
    assert raised.value.__context__ is None


def test_a_loader_without_batches_is_an_error_at_once():
    dataset = torch.utils.data.TensorDataset(torch.ones(3, 3), torch.zeros(3, dtype=torch.long))
    for loader in ([], torch.utils.data.DataLoader(dataset, batch_size=4, drop_last=True)):
        with pytest.raises(ValueError, match="train_dataloader has no batches.*drop_last"):
            make_trainer(train_dataloader=loader)


@pytest.mark.parametrize(
    ("batch", "named"),
    [(object(), "object"), ((torch.ones(2, 3), {1, 2}), "set"), ({"x": torch.ones(2).numpy()}, "ndarray")],
)
def test_a_batch_of_unknown_type_is_one_clear_error(batch, named: str):
    with pytest.raises(TypeError, match=f"a batch holds a {named}; it must be a tensor") as raised:
        make_trainer(train_dataloader=[batch]).fit()
    assert raised.value.__context__ is None and raised.value.__cause__ is None


def test_a_batch_without_tensors_is_one_clear_error():
    with pytest.raises(TypeError, match="cannot count the samples of a batch of type list"):
        make_trainer(train_dataloader=[["text", 1]]).fit()


def test_data_that_is_not_a_number_is_trained_on_and_logged_as_it_is():
    inputs = torch.ones(8, 3)
    inputs[2:] = float("nan")
    data = TensorLoader(inputs, torch.zeros(8, dtype=torch.long), batch_size=2, shuffle=False)
    memory = InMemoryLogger()
    arguments = {"train_dataloader": data, "eval_dataloader": data, "loggers": memory, "max_duration": "2ep"}
    with make_trainer(**arguments) as trainer:
        trainer.fit()
    losses = [value for _, value in memory.data["loss/train/total"]]
    assert losses[0] == losses[0] and all(value != value for value in losses[1:]) and len(losses) == 8
    assert memory.data["loss/eval/total"][-1][1] != memory.data["loss/eval/total"][-1][1]
    assert trainer.state.timestamp.epoch == 2
