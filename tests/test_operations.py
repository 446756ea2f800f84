"""Limits of what a training step asks of the device: operations, copies, reads and memory, counted as by hand.

The counting is that of `benchmarks/operations.py`, on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmark_modules import load
from live_bytes import LiveBytes
from torch import Tensor

from runner import Callback, LanguageModel, Trainer
from runner.data import TensorLoader
from runner.models import GPT

operations = load("benchmark_of_operations", "operations.py")

MORE = 3
"""Operations of a step beside those by hand, with loss and metrics logged; picking the batches takes two fewer."""


@pytest.mark.parametrize("title", ["mlp", "resnet18", "gpt"])
def test_the_trainer_adds_few_operations(title: str, tmp_path: Path):
    task = operations.TASKS[title]
    hand, ours = operations.by_hand(task), operations.with_trainer(task, tmp_path)
    assert hand.operations.total() > 10 * len(operations.WATCHED)  # those of the backward pass are seen too
    more = [one - other for one, other in zip(ours.row(), hand.row(), strict=True)]
    assert more[0] <= MORE and more[1:4] == [0, 0, 0]
    assert more[4] <= 75  # calls of Python functions


def test_operations_are_told_apart():
    counts = operations.Counts()
    x = torch.ones(4)
    with operations.Operations(counts), operations.Methods(counts):
        x.view(2, 2).t()  # a view
        torch.empty(3)  # memory alone
        x + 1
        torch.tensor([1.0, 2.0])
        x[0].item()
    assert counts.operations == {"aten.add": 1} and counts.copies == {"pageable": 1} and counts.copied == 8
    assert set(counts.reads) == {"item", "aten._local_scalar_dense"}


class Peak(Callback):
    """The most bytes that live in each batch, and what lives of the last outputs when a forward pass begins."""

    def __init__(self, live: LiveBytes):
        self.live = live
        self.peaks: list[int] = []
        self.seen: list[bool] = []

    def init(self, state, logger):
        state.unwrapped_model.register_forward_pre_hook(lambda *_: self.seen.append(hasattr(state, "outputs") or hasattr(state, "loss")))

    def batch_start(self, state, logger):
        self.live.peak = self.live.live
        if state.timestamp.batch:
            assert state.outputs.requires_grad and state.loss.requires_grad  # seen by hooks up to here

    def batch_end(self, state, logger):
        self.peaks.append(self.live.peak)


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(50_000, (12, 17), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def make_gpt() -> GPT:
    return GPT(50_000, context=16, d_model=8, n_layers=2, n_heads=2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def peak_by_hand(parts: int) -> int:
    """The most bytes that live in the last of three steps; no step's logits live until the next one has its own."""
    module = make_gpt()
    optimizer = sgd(module.parameters())

    def part(inputs: Tensor, targets: Tensor) -> None:
        logits = module(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 64
        loss.backward()

    inputs, targets = tokens()
    with LiveBytes() as live:
        for batch in range(3):
            optimizer.zero_grad()
            live.peak = live.live
            where = slice(4 * batch, 4 * batch + 4)
            for one, other in zip(inputs[where].chunk(parts), targets[where].chunk(parts), strict=True):
                part(one, other)
            optimizer.step()
    return live.peak


@pytest.mark.parametrize("parts", [1, 2])
def test_no_two_sets_of_logits_stand_at_once(parts: int, tmp_path: Path):
    with LiveBytes() as live:
        peak = Peak(live)
        loader = TensorLoader(*tokens(), batch_size=4, shuffle=False)
        model = LanguageModel(make_gpt())
        with Trainer(
            model=model,
            train_dataloader=loader,
            eval_dataloader=loader,
            optimizers=sgd,
            callbacks=[peak],
            grad_accum=parts,
            device="cpu",
            run_dir=tmp_path,
        ) as trainer:
            trainer.fit()
    assert peak.seen == [False] * len(peak.seen) and len(peak.seen) == 3 * parts + 3
    assert 0.95 < peak.peaks[-1] / peak_by_hand(parts) < 1.01


def test_memory_is_counted_until_its_last_reference_is_gone():
    with LiveBytes() as live:
        x = torch.zeros(1000, requires_grad=True)
        y = x.exp()  # saved for the backward pass, which alone keeps it
        z = y.sum()
        view = x.detach().view(10, 100)
        assert live.live == 8004
        del y
        assert live.live == 8004
        z.backward()
        assert live.live == 8004  # the gradient for the exponentials
        del x, z
        assert live.live == 4000
        del view
    assert live.live == 0 and live.peak == 12008
