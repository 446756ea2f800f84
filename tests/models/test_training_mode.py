"""Messages at the start of training about batch norm that sees only a part of each batch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from runner import ClassificationModel, Trainer
from runner.algorithms import GhostBatchNorm
from runner.data import TensorLoader
from runner.models.training_mode import count_split_norms


def make_model(*layers: nn.Module) -> ClassificationModel:
    torch.manual_seed(0)
    return ClassificationModel(nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 2)), 2)


def messages(caplog: pytest.LogCaptureFixture, model: ClassificationModel, **options: Any) -> list[str]:
    """Return the messages about batch norm of two calls of `fit`."""
    caplog.set_level(logging.INFO, "runner")
    caplog.clear()
    data = TensorLoader(torch.randn(16, 4), torch.arange(16) % 2, batch_size=8, shuffle=False)
    optimizers = {"optimizers": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    with Trainer(model=model, train_dataloader=data, device="cpu", **optimizers, **options) as trainer:
        trainer.fit()
        trainer.fit("1ep")
    return [message for message in caplog.messages if "batch norm" in message]


@pytest.mark.parametrize("split", [{"grad_accum": 2}, {"microbatch_size": 4}], ids=str)
def test_batch_norm_in_microbatches_is_mentioned_at_each_start(split: dict[str, Any], caplog: pytest.LogCaptureFixture):
    first, second = messages(caplog, make_model(nn.BatchNorm1d(6), nn.BatchNorm1d(6)), **split)
    assert first == second
    assert first.startswith("batch norm (2 layers) sees each microbatch alone, so the gradient is not that of the whol")


def test_norms_that_microbatches_do_not_change_are_not_mentioned(caplog: pytest.LogCaptureFixture):
    assert not messages(caplog, make_model(nn.BatchNorm1d(6)))
    assert not messages(caplog, make_model(nn.BatchNorm1d(6)), microbatch_size="auto")
    assert not messages(caplog, make_model(nn.GroupNorm(2, 6)), grad_accum=2)
    assert not messages(caplog, make_model(nn.BatchNorm1d(6).eval()), grad_accum=2)
    assert not messages(caplog, make_model(nn.BatchNorm1d(6)), grad_accum=2, algorithms=[GhostBatchNorm(4)])
    assert messages(caplog, make_model(nn.BatchNorm1d(6)), grad_accum=4, algorithms=[GhostBatchNorm(4)])


def test_batch_norm_on_two_ranks_is_counted_unless_it_is_synchronized(monkeypatch: pytest.MonkeyPatch):
    for norm, count in ((nn.BatchNorm1d(6), 1), (nn.SyncBatchNorm(6), 0)):
        with Trainer(model=make_model(norm), device="cpu") as trainer, monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", "2")
            assert count_split_norms(trainer.state, splits=False) == count
            assert count_split_norms(trainer.state, splits=True) == 1
