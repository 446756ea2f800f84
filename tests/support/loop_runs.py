"""Small runs of the loop that record its events, and the events that the specification's pseudocode expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tiny_runs import tiny_trainer
from torch import nn

from runner import Callback, ClassificationModel, Event, Trainer
from runner.data import TensorLoader

# Four batches an epoch, each of two samples; each sample has three tokens.
PER_EPOCH, SAMPLES, TOKENS = 4, 2, 6


class Tokens(ClassificationModel):
    """A classifier whose inputs count as tokens."""

    def num_tokens(self, batch):
        return batch[0].numel()


class Trace(Callback):
    """Records every event of a fit with its time; the start of an evaluation is recorded with its label."""

    def __init__(self):
        self.events: list[str] = []
        self.times: list[tuple[str, int, int, int]] = []

    def run_event(self, event, state, logger):
        name = f"EVAL_START {state.dataloader_label}" if event is Event.EVAL_START else event.name
        self.events.append(name)
        now = state.timestamp
        self.times.append((name, now.epoch, now.batch, now.batch_in_epoch))

    def at(self, name: str) -> list[tuple[int, int, int]]:
        """Return the epoch, batch and batch in the epoch at each event of this name."""
        return [entry[1:] for entry in self.times if entry[0] == name]

    def take(self) -> list[str]:
        """Return the events so far, and forget them."""
        events = self.events.copy()
        self.events.clear()
        self.times.clear()
        return events


def make_data(batches: int = PER_EPOCH) -> TensorLoader:
    inputs = torch.arange(3.0 * SAMPLES * batches).view(-1, 3) / 10
    return TensorLoader(inputs, torch.arange(SAMPLES * batches) % 2, batch_size=SAMPLES, shuffle=False)


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "model": Tokens(nn.Linear(3, 2), 2),
        "train_dataloader": make_data(),
    }
    return tiny_trainer(*callbacks, **(defaults | arguments))


def batch_events(microbatches: int) -> list[str]:
    micro = ["BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_LOSS", "AFTER_LOSS", "BEFORE_BACKWARD", "AFTER_BACKWARD"]
    return [
        *("AFTER_DATALOADER", "BATCH_START", "BEFORE_TRAIN_BATCH"),
        *micro * microbatches,
        *("AFTER_TRAIN_BATCH", "BATCH_END"),
    ]


def evaluator_events(label: str, batches: int = 1) -> list[str]:
    batch = ["EVAL_BATCH_START", "EVAL_BEFORE_FORWARD", "EVAL_AFTER_FORWARD", "EVAL_BATCH_END"]
    return [f"EVAL_START {label}", *batch * batches, "EVAL_END"]


def evaluations(labels: Sequence[str]) -> list[str]:
    if not labels:
        return []
    return ["EVAL_BEFORE_ALL", *(event for label in labels for event in evaluator_events(label)), "EVAL_AFTER_ALL"]


def fit_events(
    batches: int,
    *,
    start: int = 0,
    microbatches: int = 1,
    finds_end: bool = False,
    epoch_ends: bool = True,
    iteration: int | None = None,
    at_batch: Mapping[int, Sequence[str]] = {},
    at_epoch: Mapping[int, Sequence[str]] = {},
    final: Sequence[str] = (),
) -> list[str]:
    """Return the events that the specification's pseudocode expects.

    Args:
        batches: number of batches trained at the end.
        start: number of batches trained at the beginning.
        microbatches: number of microbatches in each batch.
        finds_end: whether the last epoch ends when the loader has no further batch, because its length is unknown.
        epoch_ends: whether the last epoch ends if the last batch was its last one.
        iteration: number of epochs in an iteration; None: all of them.
        at_batch: labels of the evaluations after a batch, by its number, counted from 1.
        at_epoch: labels of the evaluations after an epoch, by its number, counted from 1.
        final: labels of the evaluations at the end of training.
    """
    events = ["FIT_START"]
    for index in range(start, batches):
        epoch, in_epoch = divmod(index, PER_EPOCH)
        if in_epoch == 0:
            if epoch % (iteration or 1000) == 0 or (start == index and not iteration):
                events += ["ITERATION_START"]
            events += ["EPOCH_START"]
        events += ["BEFORE_DATALOADER", *batch_events(microbatches)]
        events += [*evaluations(at_batch.get(index + 1, ())), "BATCH_CHECKPOINT"]
        is_last = index + 1 == batches
        if in_epoch + 1 == PER_EPOCH and (not is_last or epoch_ends):
            events += ["BEFORE_DATALOADER"] if finds_end or not is_last else []
            events += ["EPOCH_END", *evaluations(at_epoch.get(epoch + 1, ())), "EPOCH_CHECKPOINT"]
            if (epoch + 1) % iteration == 0 if iteration else is_last:
                events += ["ITERATION_END", "ITERATION_CHECKPOINT"]
    return [*events, *evaluations(final), "FIT_END"]
