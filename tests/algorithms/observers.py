"""Callbacks and functions with which tests of algorithms watch or stop a run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from runner import Callback, Logger, State, Trainer, evaluation_weights, save_checkpoint


class BatchRecord(Callback):
    """Stores the gradients for the optimizer, and the batches after augmentation."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor]] = []
        self.batches: list[Any] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.batches.append(state.batch)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # Algorithms act before callbacks at every event, so gradients are already clipped.
        parameters = state.unwrapped_model.parameters()
        self.gradients.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])


class History(Callback):
    """Stores the weights before training and after each batch."""

    def __init__(self) -> None:
        self.after_batch: list[dict[str, Tensor]] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        self.initial = copy.deepcopy(dict(state.unwrapped_model.state_dict()))

    def batch_end(self, state: State, logger: Logger) -> None:
        self.after_batch.append(copy.deepcopy(dict(state.unwrapped_model.state_dict())))


class Shapes(Callback):
    """Stores the shapes of inputs in training and in evaluation."""

    def __init__(self) -> None:
        self.trained: set[tuple[int, ...]] = set()
        self.evaluated: set[tuple[int, ...]] = set()

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self.trained.add(tuple(state.batch[0].shape))

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        self.evaluated.add(tuple(state.batch[0].shape))


class StopAt(Callback):
    """Ends training after a number of batches, without changing `max_duration`, which schedules depend on."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == self.batch:
            state.stop_training()


class SaveAt(Callback):
    """Saves a checkpoint after some batches, in folders named after them; after the last batch, again at FIT_END."""

    def __init__(self, folder: Path, *batches: int) -> None:
        self.folder, self.batches = folder, batches

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch in self.batches:
            save_checkpoint(state, self.folder / str(state.timestamp.batch))

    fit_end = batch_checkpoint


def averaged(trainer: Trainer) -> dict[str, Tensor]:
    """Return the weights that evaluations see."""
    with evaluation_weights(trainer.state):
        return copy.deepcopy(dict(trainer.state.unwrapped_model.state_dict()))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings that were logged."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
