"""The evaluation and prediction loops. Each of their events fires in exactly one place.

The loops leave training as it was: mode, weights, current batch, gradients and clock. All but the clock are restored
before EVAL_AFTER_ALL and EVAL_STANDALONE_END. A model's random numbers for a batch depend only on the seed, the rank
and the batch number, so equal weights give equal values, even if callbacks draw random numbers too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from runner.core.engine import evaluation_weights
from runner.device.batch import map_tensors
from runner.distributed.collectives import broadcast_buffers
from runner.models.loss import total_of
from runner.models.model import in_eval_mode
from runner.timing.time import Timestamp
from runner.training.dataloader import BatchStream
from runner.training.evaluator import Evaluator
from runner.training.metrics import WeightedMean, update_metrics
from runner.training.run import Run


def evaluate_now(run: Run, evaluators: Sequence[Evaluator]) -> None:
    """Run evaluators during training, as one group; without evaluators, do nothing. Call it on all ranks."""
    if not evaluators:
        return
    run.clock.pause()
    with evaluation(run):
        run.on.eval_before_all()
        for evaluator in evaluators:
            evaluate(run, evaluator)
    with run.state.changing(settles=run.state.is_consistent):  # so that a resumed run does not fire this again
        run.on.eval_after_all()
    run.clock.resume()


def evaluate_standalone(
    run: Run, evaluators: Sequence[Evaluator], weights: AbstractContextManager[None] | None = None
) -> None:
    """Run evaluators on demand, outside training. Call it on all ranks.

    Args:
        run: the run, with its model.
        evaluators: the evaluators to run.
        weights: a context manager that puts the weights to evaluate into the model; None: the same weights that
            evaluations during training use.
    """
    run.clock.pause()
    with evaluation(run, weights):
        run.on.eval_standalone_start()
        for evaluator in evaluators:
            evaluate(run, evaluator)
    run.on.eval_standalone_end()
    run.clock.resume()


def evaluate(run: Run, evaluator: Evaluator) -> None:
    """Run an evaluator over its data, counting each sample once on any number of ranks, and store its metric values."""
    state = run.state
    on = run.on
    stream = run.eval_streams[evaluator.label]
    metrics = state.eval_metrics[evaluator.label]
    for metric in metrics.values():
        metric.reset()
    mean_loss = WeightedMean(state.device)
    state.stream = stream
    state.eval_timestamp = Timestamp()
    on.eval_start()
    for batch in stream.start():
        state.batch = batch
        samples, all_samples = stream.counts(state.eval_timestamp.batch, state.batch)
        on.eval_batch_start()
        on.eval_before_forward()
        run.eval_stream.start(state.eval_timestamp.batch, 0)
        state.drop_outputs()
        state.outputs = run.eval_forward(state.batch)
        on.eval_after_forward()
        update_metrics(state.unwrapped_model, state.batch, state.outputs, metrics, counts=samples > 0)
        if run.has_loss:  # even for a stand-in batch, as in training: a loss may gather from all ranks
            batch_loss = run.loss(state.outputs, state.batch)
            if not run.loss_is_checked:
                run.check_loss(batch_loss, "loss", trains=False)
            if samples:
                mean_loss.add(total_of(batch_loss), state.unwrapped_model.loss_weight(state.batch))
        state.eval_timestamp = state.eval_timestamp.to_next_batch(all_samples)
        on.eval_batch_end()
    if state.eval_timestamp.batch == 0:
        raise ValueError(f"evaluator {evaluator.label!r} yielded no batch; an exhausted generator yields none")
    values = {name: metric.compute() for name, metric in metrics.items()}
    state.eval_metric_values[evaluator.label] = {**values, "loss": mean_loss.compute()} if run.has_loss else values
    evaluator.evaluated_at = state.timestamp.batch
    with state.changing(settles=state.is_consistent):
        on.eval_end()


def predict(run: Run, stream: BatchStream) -> list[Any]:
    """Return this rank's outputs on the CPU, one entry per batch. Call it on all ranks."""
    predictions: list[Any] = []

    def keep(outputs: Any, samples: int) -> None:
        if samples:
            # The intended sync.
            predictions.append(map_tensors(outputs, lambda x: x.cpu(), objects=lambda output: output.to("cpu")))

    predict_each(run, stream, keep)
    return predictions


def predict_each(run: Run, stream: BatchStream, take: Callable[[Any, int], None]) -> None:
    """Predict batch by batch, passing each batch's outputs to a function instead of keeping them. All ranks.

    Args:
        run: the run, with its model.
        stream: the data to predict.
        take: called on all ranks for each `state.batch`, with the outputs and this rank's number of samples, which is 0
            if the batch only stands in for an empty share.
    """
    state = run.state
    on = run.on
    run.clock.pause()
    with evaluation(run):
        state.stream = stream
        state.predict_timestamp = Timestamp()
        on.predict_start()
        for batch in stream.start():
            state.batch = batch
            samples, all_samples = stream.counts(state.predict_timestamp.batch, state.batch)
            on.predict_batch_start()
            on.predict_before_forward()
            run.eval_stream.start(state.predict_timestamp.batch, 0)
            state.drop_outputs()
            state.outputs = run.eval_forward(state.batch)
            on.predict_after_forward()
            take(state.outputs, samples)
            state.predict_timestamp = state.predict_timestamp.to_next_batch(all_samples)
            on.predict_batch_end()
        on.predict_end()
    run.clock.resume()


_IN_FLIGHT = ("batch", "microbatch", "outputs", "loss", "stream")


@contextmanager
def evaluation(run: Run, weights: AbstractContextManager[None] | None = None) -> Generator[None]:
    """Put the model in evaluation mode with the weights to evaluate, then restore the state of training."""
    state = run.state
    before = {name: getattr(state, name) for name in _IN_FLIGHT if hasattr(state, name)}
    try:
        with in_eval_mode(state.unwrapped_model), torch.no_grad(), weights or evaluation_weights(state):
            broadcast_buffers(state.unwrapped_model)
            yield
    finally:
        for name in _IN_FLIGHT:
            if name in before:
                setattr(state, name, before[name])
            elif hasattr(state, name):
                delattr(state, name)
