"""The loops of evaluation and prediction: every event of theirs fires here, each at one place.

Nothing of training is changed by them: mode, batch in flight, gradients, clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from runner.batch import map_tensors
from runner.dataloader import BatchStream
from runner.distributed import broadcast_buffers
from runner.engine import evaluation_weights
from runner.evaluator import Evaluator
from runner.event import Event
from runner.loss import total_of
from runner.metrics import WeightedMean
from runner.time import Timestamp

if TYPE_CHECKING:
    from runner.trainer import Trainer


def evaluate_now(trainer: Trainer, evaluators: Sequence[Evaluator]) -> None:
    """Run evaluators inside training, as one group; nothing when none is given. All ranks."""
    if not evaluators:
        return
    fire = trainer.engine.run_event
    with evaluation(trainer):
        fire(Event.EVAL_BEFORE_ALL)
        for evaluator in evaluators:
            evaluate(trainer, evaluator)
        fire(Event.EVAL_AFTER_ALL)


def evaluate_standalone(trainer: Trainer, evaluators: Sequence[Evaluator]) -> None:
    """Run evaluators on demand. All ranks."""
    fire = trainer.engine.run_event
    with evaluation(trainer):
        fire(Event.EVAL_STANDALONE_START)
        for evaluator in evaluators:
            evaluate(trainer, evaluator)
        fire(Event.EVAL_STANDALONE_END)


def evaluate(trainer: Trainer, evaluator: Evaluator) -> None:
    """Run one evaluator over its data, each sample once over all ranks, and leave its values in the state."""
    state, fire, model = trainer.state, trainer.engine.run_event, trainer.state.unwrapped_model
    stream = trainer.eval_streams[evaluator.label]
    metrics = state.eval_metrics[evaluator.label]
    for metric in metrics.values():
        metric.reset()
    loss = WeightedMean(state.device)
    state.dataloader, state.dataloader_label, state.dataloader_len = stream.loader, evaluator.label, stream.length
    state.eval_timestamp = Timestamp()
    fire(Event.EVAL_START)
    for state.batch in islice(stream.start(), evaluator.subset_num_batches):
        samples, all_samples = stream.counts(state.eval_timestamp.batch, model.num_samples(state.batch))
        fire(Event.EVAL_BATCH_START)
        fire(Event.EVAL_BEFORE_FORWARD)
        with trainer.autocast():
            state.outputs = model.eval_forward(state.batch)
        fire(Event.EVAL_AFTER_FORWARD)
        if samples:
            for metric in metrics.values():
                model.update_metric(state.batch, state.outputs, metric)
            if trainer.has_loss:
                loss.add(total_of(model.loss(state.outputs, state.batch)), model.loss_weight(state.batch))
        state.eval_timestamp = state.eval_timestamp.to_next_batch(all_samples)
        fire(Event.EVAL_BATCH_END)
    if state.eval_timestamp.batch == 0:
        raise ValueError(
            f"evaluator {evaluator.label!r} yielded no batch; a generator that is used up cannot be read again"
        )
    values = {name: metric.compute() for name, metric in metrics.items()}
    state.eval_metric_values[evaluator.label] = {**values, "loss": loss.compute()} if trainer.has_loss else values
    state.evaluated_at[evaluator.label] = state.timestamp.batch
    fire(Event.EVAL_END)


def predict(trainer: Trainer, stream: BatchStream) -> list[Any]:
    """Return this rank's outputs by batch, on the CPU."""
    state, fire = trainer.state, trainer.engine.run_event
    predictions = []
    with evaluation(trainer):
        state.dataloader, state.dataloader_label, state.dataloader_len = stream.loader, "predict", stream.length
        state.predict_timestamp = Timestamp()
        fire(Event.PREDICT_START)
        for state.batch in stream.start():
            samples, all_samples = stream.counts(
                state.predict_timestamp.batch, state.unwrapped_model.num_samples(state.batch)
            )
            fire(Event.PREDICT_BATCH_START)
            fire(Event.PREDICT_BEFORE_FORWARD)
            with trainer.autocast():
                state.outputs = state.unwrapped_model.eval_forward(state.batch)
            fire(Event.PREDICT_AFTER_FORWARD)
            if samples:
                predictions.append(map_tensors(state.outputs, lambda tensor: tensor.cpu()))  # The intended sync.
            state.predict_timestamp = state.predict_timestamp.to_next_batch(all_samples)
            fire(Event.PREDICT_BATCH_END)
        fire(Event.PREDICT_END)
    return predictions


_IN_FLIGHT = ("batch", "microbatch", "outputs", "loss", "dataloader", "dataloader_label", "dataloader_len")


@contextmanager
def evaluation(trainer: Trainer) -> Iterator[None]:
    """Inside, the model is in evaluation mode with the weights to evaluate; outside, nothing of training has changed."""
    state, model = trainer.state, trainer.state.unwrapped_model
    before = {name: getattr(state, name) for name in _IN_FLIGHT if hasattr(state, name)}
    modes = [(module, module.training) for module in model.modules()]
    trainer.pulse.pause()
    model.eval()
    try:
        with torch.no_grad(), evaluation_weights(state):
            broadcast_buffers(model)
            yield
    finally:
        for module, training in modes:
            module.training = training
        for name in _IN_FLIGHT:
            if name in before:
                setattr(state, name, before[name])
            elif hasattr(state, name):
                delattr(state, name)
        trainer.pulse.resume()
