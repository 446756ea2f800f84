"""A state that is not finite is never saved, so the links still point to earlier checkpoints."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from saver_runs import Model, SendSignal, WithoutTrainMetrics, fit, saved, target

from runner import Callback
from runner.algorithms import EMA
from runner.callbacks import CheckpointSaver, NaNMonitor

INF, NAN = float("inf"), float("nan")
BATCH = 7  # the first batch with a value that is not finite; an epoch has four


class SetValue(Callback):
    """Sets the loss or a weight to a value at the end of each batch from `BATCH` to the one before `until`."""

    def __init__(self, part: str, value: float, until: int = 10**9):
        self.part, self.value, self.until = part, value, until

    def batch_end(self, state, logger):
        if BATCH <= state.timestamp.batch < self.until:
            if self.part == "loss":
                state.total_loss = torch.tensor(self.value)
            else:
                with torch.no_grad():
                    state.unwrapped_model.get_parameter("module.weight")[1, 2] = self.value


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("part", ["loss", "weights"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_state_that_is_not_finite_is_neither_latest_nor_best(
    tmp_path: Path, caplog: Any, asynchronous: bool, part: str, value: float
):
    saver = CheckpointSaver("1ba", keep=-1, monitor="loss", mode="max", asynchronous=asynchronous)
    with caplog.at_level(logging.WARNING, "runner"):
        trainer = fit(tmp_path, saver, SetValue(part, value), max_duration="3ep", eval_interval="1ba")
    assert trainer.state.timestamp.epoch == 3
    assert {int(name.partition("-ba")[2]) for name in saved(tmp_path)} == set(range(1, BATCH))
    assert target(tmp_path, "latest") == f"ep1-ba{BATCH - 1}"
    assert target(tmp_path, "best") in saved(tmp_path)
    message, at_the_end = caplog.messages
    assert at_the_end.startswith("the loss of the last batch is ")
    reason = f"the loss is {value}" if part == "loss" else "the weights are not finite: 'module.weight'"
    assert f"ep1-ba{BATCH} was not written: {reason}; newest checkpoint: " in message


def test_saving_continues_when_all_values_are_finite_again(tmp_path: Path, caplog: Any):
    with caplog.at_level(logging.WARNING, "runner"):
        fit(tmp_path, CheckpointSaver("1ba", keep=-1), SetValue("loss", NAN, until=9), max_duration="3ep")
    assert {int(name.partition("-ba")[2]) for name in saved(tmp_path)} == {*range(1, BATCH), *range(9, 13)}
    resumed = fit(tmp_path, CheckpointSaver("1ba", keep=-1), max_duration="4ep", resume_path=tmp_path)
    assert target(tmp_path, "latest") == "ep4-ba16"
    saver = next(callback for callback in resumed.state.callbacks if isinstance(callback, CheckpointSaver))
    assert {*saver.state_dict()["saved"]} == saved(tmp_path)


def test_a_nan_loss_that_is_detected_a_batch_late_is_not_saved(tmp_path: Path):
    class LateNaNMonitor(NaNMonitor):
        """Checks the loss one batch late, as on a GPU that lags behind."""

        def batch_end(self, state, logger):
            self.loss, previous = state.total_loss, getattr(self, "loss", torch.zeros(()))
            if not previous.isfinite():
                raise FloatingPointError("late")

    with pytest.raises(FloatingPointError, match="late"):
        fit(tmp_path, CheckpointSaver("1ba"), SetValue("loss", NAN), LateNaNMonitor())
    assert target(tmp_path, "latest") == f"ep1-ba{BATCH - 1}"


def test_weights_that_are_not_finite_are_not_saved_with_a_finite_average(tmp_path: Path):
    class EarlyEMA(EMA):
        """An average of the weights before `BATCH`."""

        def batch_end(self, state, logger):
            if state.timestamp.batch < BATCH:
                super().batch_end(state, logger)

    fit(tmp_path, CheckpointSaver("1ba"), SetValue("weights", NAN), algorithms=[EarlyEMA()], max_duration="3ep")
    assert target(tmp_path, "latest") == f"ep1-ba{BATCH - 1}"


def test_a_signal_does_not_save_a_batch_whose_loss_is_not_finite(tmp_path: Path):
    with pytest.raises(SystemExit):
        fit(tmp_path, CheckpointSaver(), SetValue("loss", INF), SendSignal(BATCH, signal.SIGTERM))
    assert saved(tmp_path) == {"ep1-ba4"}


def test_an_error_in_a_batch_whose_loss_is_not_finite_saves_the_batch_before(tmp_path: Path):
    class FailOnNaN(Callback):
        def after_train_batch(self, state, logger):
            if state.timestamp.batch == 5:
                state.total_loss = torch.tensor(NAN)
                raise FloatingPointError("the loss is NaN")

    with pytest.raises(FloatingPointError, match="the loss is NaN"):
        fit(tmp_path, CheckpointSaver(), FailOnNaN(), model=WithoutTrainMetrics())
    assert target(tmp_path, "latest") == "ep1-ba5"


def test_masks_and_frozen_parameters_may_be_infinite(tmp_path: Path):
    model = Model()
    model.register_buffer("mask", torch.full((2, 2), -INF))
    model.frozen = torch.nn.Parameter(torch.full((2,), INF), requires_grad=False)
    model.empty = torch.nn.Parameter(torch.zeros(0))
    fit(tmp_path, CheckpointSaver(), model=model, max_duration="1ep")
    assert target(tmp_path, "latest") == "ep1-ba4"
