"""A state that is not finite is never saved; earlier checkpoints stay linked and are resumed from."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from saver_runs import Model, fit, make_trainer, saved, target

from runner import Callback
from runner.algorithms import EMA
from runner.callbacks import CheckpointSaver, NaNMonitor

INF, NAN = float("inf"), float("nan")
BATCH = 7  # from 1; four are an epoch


class Spoils(Callback):
    """Makes the loss or weights of some batches not finite."""

    def __init__(self, what: str, value: float, until: int = 10**9):
        self.what, self.value, self.until = what, value, until

    def batch_end(self, state, logger):
        if BATCH <= state.timestamp.batch < self.until:
            if self.what == "loss":
                state.total_loss = torch.tensor(self.value)
            else:
                with torch.no_grad():
                    state.unwrapped_model.get_parameter("module.weight")[1, 2] = self.value


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("what", ["loss", "weights"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_state_that_is_not_finite_is_neither_latest_nor_best(
    tmp_path: Path, caplog: Any, asynchronous: bool, what: str, value: float
):
    saver = CheckpointSaver("1ba", keep=-1, monitor="loss", mode="max", asynchronous=asynchronous)
    with caplog.at_level(logging.WARNING, "runner"):
        trainer = fit(tmp_path, saver, Spoils(what, value), max_duration="3ep", eval_interval="1ba")
    assert trainer.state.timestamp.epoch == 3
    assert {int(name.partition("-ba")[2]) for name in saved(tmp_path)} == set(range(1, BATCH))
    assert target(tmp_path, "latest") == f"ep1-ba{BATCH - 1}"
    assert target(tmp_path, "best") in saved(tmp_path)
    (record,) = caplog.records
    wrong = f"the loss is {value}" if what == "loss" else "the weights are not finite: 'module.weight'"
    assert f"ep1-ba{BATCH} was not written: {wrong}; newest checkpoint: " in record.getMessage()


def test_saving_continues_when_all_values_are_finite_again(tmp_path: Path, caplog: Any):
    with caplog.at_level(logging.WARNING, "runner"):
        fit(tmp_path, CheckpointSaver("1ba", keep=-1), Spoils("loss", NAN, until=9), max_duration="3ep")
    assert {int(name.partition("-ba")[2]) for name in saved(tmp_path)} == {*range(1, BATCH), *range(9, 13)}
    resumed = fit(tmp_path, CheckpointSaver("1ba", keep=-1), max_duration="4ep", resume_path=tmp_path)
    assert target(tmp_path, "latest") == "ep4-ba16"
    saver = next(callback for callback in resumed.state.callbacks if isinstance(callback, CheckpointSaver))
    assert {*saver.state_dict()["saved"]} == saved(tmp_path)


def test_a_late_look_at_the_loss_finds_no_checkpoint_of_it(tmp_path: Path):
    class Late(NaNMonitor):
        """Checks the loss one batch late, as on a GPU that lags behind."""

        def batch_end(self, state, logger):
            self.seen, previous = state.total_loss, getattr(self, "seen", torch.zeros(()))
            if not previous.isfinite():
                raise FloatingPointError("late")

    with pytest.raises(FloatingPointError, match="late"):
        fit(tmp_path, CheckpointSaver("1ba"), Spoils("loss", NAN), Late())
    assert target(tmp_path, "latest") == f"ep1-ba{BATCH - 1}"


def test_an_average_hides_no_weights_that_are_not_finite(tmp_path: Path):
    class Freezes(EMA):
        """An average without the last batches."""

        def batch_end(self, state, logger):
            if state.timestamp.batch < BATCH:
                super().batch_end(state, logger)

    fit(tmp_path, CheckpointSaver("1ba", keep=-1), Spoils("weights", NAN), algorithms=[Freezes()], max_duration="3ep")
    assert target(tmp_path, "latest") == f"ep1-ba{BATCH - 1}"


def test_a_signal_leaves_none_of_a_batch_whose_loss_is_not_finite(tmp_path: Path):
    class Signal(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch == BATCH:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(tmp_path, CheckpointSaver(), Spoils("loss", INF), Signal())
    assert saved(tmp_path) == {"ep1-ba4"}


def test_an_error_in_a_batch_whose_loss_is_not_finite_leaves_the_batch_before(tmp_path: Path):
    class Ends(Callback):
        def after_train_batch(self, state, logger):
            if state.timestamp.batch == 5:
                state.total_loss = torch.tensor(NAN)
                raise FloatingPointError("found")

    class WithoutMetrics(Model):
        def metrics(self, train: bool) -> Mapping[str, Any]:
            return {} if train else super().metrics(train)

    with pytest.raises(FloatingPointError, match="found"):
        fit(tmp_path, CheckpointSaver(), Ends(), model=WithoutMetrics())
    assert target(tmp_path, "latest") == "ep1-ba5"


def test_masks_and_frozen_parameters_may_be_infinite(tmp_path: Path):
    model = Model()
    model.register_buffer("mask", torch.full((2, 2), -INF))
    model.frozen = torch.nn.Parameter(torch.full((2,), INF), requires_grad=False)
    model.empty = torch.nn.Parameter(torch.zeros(0))
    with make_trainer(tmp_path, CheckpointSaver(), model=model, max_duration="1ep") as trainer:
        trainer.fit()
    assert target(tmp_path, "latest") == "ep1-ba4"
