from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from runner import Callback, ClassificationModel, Interval, Trainer
from runner.callbacks import CallbackBudget, InMemoryLogger, OptimizerMonitor
from runner.callbacks._waits import Waits
from runner.callbacks.callback_budget import COLUMNS, SAMPLED, SKIPPED, is_sampled


class Slow(Callback):
    """Takes 20 ms after each batch, and reads three values."""

    def __init__(self, interval: str = "1ba") -> None:
        self.interval = Interval(interval)

    def batch_end(self, state, logger):
        if state.is_due(self.interval):
            time.sleep(0.02)
            state.total_loss.item()
            float(state.total_loss)
            state.total_loss.cpu()


class SlowOnce(Callback):
    """Takes 0.4 s once, in a batch that is measured."""

    def batch_end(self, state, logger):
        if state.previous_timestamp.batch == min(number for number in range(SKIPPED, 30) if is_sampled(number)):
            time.sleep(0.4)


def fit(*callbacks: Callback, duration: str = "100ba") -> list[dict[str, Any]]:
    """Return the rows of the table that was logged."""
    memory = InMemoryLogger()
    torch.manual_seed(0)
    with Trainer(
        model=ClassificationModel(nn.Linear(2, 2), 2),
        train_dataloader=[(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))] * 50,
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        max_duration=duration,
        callbacks=[*callbacks],
        loggers=[memory],
        device="cpu",
    ) as trainer:
        trainer.fit()
    return [dict(zip(COLUMNS, row, strict=True)) for row in memory.tables.get("callback_budget", {"rows": []})["rows"]]


def test_what_costs_too_much_is_named_with_the_interval_that_would_do(caplog):
    first, *others = fit(CallbackBudget(0.01), Slow(), OptimizerMonitor())
    assert first["callback"] == "slow" and first["share"] > 0.01
    assert first["us per step"] >= 20_000 * 0.99
    assert first["waits per step"] == 3.0
    assert first["key"] == "interval" and first["now"] == "1ba"
    factor = int(first["enough"].removesuffix("ba"))
    total = first["share"] + sum(row["share"] for row in others)
    assert total / factor <= 0.01 < total / (factor - 1)
    assert [row["callback"] for row in others] == ["optimizer_monitor"]
    (said,) = [record.getMessage() for record in caplog.records if "callbacks take" in record.getMessage()]
    assert "more than callback_budget.share=0.01: slow " in said and "; set callbacks.slow.interval=" in said


def test_what_costs_little_is_only_listed(caplog):
    rows = fit(CallbackBudget(0.99), OptimizerMonitor())
    assert [(row["callback"], row["key"]) for row in rows] == [("optimizer_monitor", None)]
    assert 0 < rows[0]["share"] < 0.99 and rows[0]["us per step"] > 0
    assert not caplog.records


def test_strict_ends_the_run():
    with pytest.raises(
        RuntimeError, match=r"callbacks take .*% of the time, more than callback_budget.share=0.01: slow"
    ):
        fit(CallbackBudget(0.01, strict=True), Slow())


def test_a_strict_run_too_short_to_judge_says_so(caplog):
    assert fit(CallbackBudget(strict=True), Slow(), duration="15ba") == []
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("callback_budget judges nothing: of 15 batches it has timed ")


def test_what_happens_once_counts_once():
    rows = {row["callback"]: row for row in fit(CallbackBudget(0.99), SlowOnce())}
    spent = rows["slow_once"]["us per step"] * 100 / 1e6
    assert 0.4 * 0.99 <= spent < 1.2  # not multiplied by the batches that were not measured


@pytest.mark.parametrize("every", [1, 2, 5, 10, 50, 100])
def test_batches_at_any_interval_are_measured_as_often_as_others(every: int):
    numbers = range(every * 20, every * 1020, every)
    assert sum(map(is_sampled, numbers)) / len(numbers) == pytest.approx(SAMPLED, abs=0.02)


def test_waits_are_counted():
    x = torch.ones(2)
    with Waits() as waits:
        x.sum()
        x.sum().item()
        x.tolist()
        bool(x[0] > 0)
        x.nonzero()
        x.to("cpu")  # it is there already
    assert waits.count == 4


@pytest.mark.parametrize("share", [0, 1, -0.1, True])
def test_a_share_out_of_range_is_refused(share: Any):
    with pytest.raises(ValueError, match=f"share={share!r}: must be a share of the training time"):
        CallbackBudget(share)
