"""Three ways to compute the gradient of a batch: whole, in microbatches, or in microbatches that fit in memory.

Each leaves in `.grad` the gradient of the loss averaged over the global batch.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from runner.core.state import State
from runner.device.attempts import CANNOT_RETRY, is_out_of_memory, save_for_retry, shapes_of
from runner.device.batch import split
from runner.device.memory import bytes_in_use
from runner.distributed.collectives import any_rank, max_over_ranks
from runner.models.loss import Share, detach, fractions, root_gradient, total_of, weighted_sum
from runner.training.run import Accumulate, Run

log = logging.getLogger("runner")


def choose_accumulation(state: State, reduces_in_backward: bool) -> Accumulate:
    """Return the function that computes the gradient of a batch.

    Args:
        state: the state, with the size or number of microbatches.
        reduces_in_backward: whether DDP averages gradients over the ranks in the last backward pass of a batch.
    """
    if state.microbatch_size == "auto":
        return FittingMicrobatches()
    is_split = state.grad_accum > 1 or state.microbatch_size is not None or not reduces_in_backward
    return in_microbatches if is_split else whole_batch


def whole_batch(run: Run, share: Share) -> None:
    """Add to `.grad` the gradient of the loss averaged over the global batch, in one forward and backward pass.

    Args:
        run: with `state.batch` set.
        share: returns this rank's share of the global batch, see `rank_share`.
    """
    state = run.state
    state.microbatch = state.batch
    train_microbatch(run, 0, share)
    state.total_loss, state.loss_parts = detach(state.loss)


def in_microbatches(run: Run, share: Share) -> None:
    """Compute the same gradient as `whole_batch`, one microbatch at a time, each weighted by its share of the batch."""
    state = run.state
    model = state.unwrapped_model
    size = state.samples_per_microbatch
    microbatches = split(state.batch, model.num_samples(state.batch), model.slice_batch, state.grad_accum, size)
    parts = fractions(model, [microbatch for _, microbatch in microbatches])
    rounds = len(microbatches)
    if run.is_sharded and (state.grad_accum > 1 or size is not None):
        rounds = max_over_ranks(rounds)  # ranks with fewer samples may have fewer microbatches
    losses: list[tuple[Tensor, dict[str, Tensor]]] = []
    for index, (state.microbatch_start, state.microbatch) in enumerate(microbatches):
        is_last = index == rounds - 1
        with nullcontext() if is_last and run.reduces_in_backward else run.unsynchronized():
            train_microbatch(run, index, lambda part=parts[index]: part * share())
        losses.append(detach(state.loss))
    if rounds > len(microbatches):  # the passes of other ranks still need this rank's shards
        is_padding = state.batch_is_padding
        state.batch_is_padding = True
        for index in range(len(microbatches), rounds):
            train_microbatch(run, index, lambda: 0.0 * parts[-1] * share())
        state.batch_is_padding = is_padding
    state.total_loss, state.loss_parts = weighted_sum(losses, parts)


class FittingMicrobatches:
    """Calls `in_microbatches`, and repeats it with microbatches of half the size while any rank runs out of memory.

    A failed attempt must not change training metrics or buffers such as running statistics, so they are copied before a
    batch that may fail. A batch is assumed to fit, and nothing is copied, if a batch of the same shapes has fit in
    microbatches of this size with at least as much memory in use. If it does not fit after all, and may have changed
    metrics or buffers, the run ends, and no checkpoint contains the changes.
    """

    def __init__(self) -> None:
        self._fit: dict[Any, int] = {}
        """The most bytes that were in use before a batch that fit, by microbatch size and batch shapes."""

    def __call__(self, run: Run, share: Share) -> None:
        state = run.state
        state.fitting_size = state.fitting_size or state.unwrapped_model.num_samples(state.batch)
        shapes = shapes_of(state.batch)
        used = bytes_in_use(state.device)
        has_fit = shapes is not None and used <= self._fit.get((state.fitting_size, shapes), -1)
        restore = (lambda: None) if has_fit else save_for_retry(state.unwrapped_model, state.train_metrics)
        is_only_attempt = has_fit and (run.has_buffers or bool(state.train_metrics))
        is_computed = False
        while True:
            size = state.fitting_size
            try:
                if not is_computed:
                    in_microbatches(run, share)
                    is_computed = True
            except RuntimeError as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                if is_only_attempt:
                    error.add_note(CANNOT_RETRY.format(size=size, half=size // 2))
                    raise
            if not any_rank(not is_computed):
                break
            state.fitting_size = max(1, size // 2)
            log.warning("out of memory with microbatches of %d samples: trying again with %d", size, state.fitting_size)
            if is_only_attempt:
                continue  # only another rank failed; this rank keeps its gradient
            is_computed = False
            state.drop_outputs()  # they would keep the graph of the failed attempt in memory
            for parameter in run.parameters:
                parameter.grad = None
            torch.cuda.empty_cache()  # does nothing without CUDA
            restore()
        self._fit[state.fitting_size, shapes] = max(used, self._fit.get((state.fitting_size, shapes), -1))


def train_microbatch(run: Run, index: int, scale: Share) -> None:
    """Run forward, loss and backward of `state.microbatch`.

    Args:
        run: with `state.microbatch` set.
        index: index of the microbatch in its batch.
        scale: returns the factor that multiplies the loss for the backward pass; called after the forward pass, or
            before a model's own training step.
    """
    state = run.state
    on = run.on
    on.before_forward()
    state.drop_outputs()
    run.forward_stream.start(state.timestamp.batch, index)  # hooks may have drawn from the same generators
    if run.training_step is not None:
        state.loss_scale = scale()
        if state.scaler is not None:
            state.loss_scale = state.scaler.scale(torch.ones((), device=state.device)) * state.loss_scale
        state.loss = run.training_step(state)
        if not run.loss_is_checked:
            run.check_loss(state.loss, "training_step", trains=True)
        on.after_backward()
        return
    state.outputs = run.forward(state.microbatch)
    on.after_forward()
    on.before_loss()
    state.loss = run.loss(state.outputs, state.microbatch)
    if not run.loss_is_checked:
        run.check_loss(state.loss, "loss", trains=True)
    on.after_loss()
    on.before_backward()
    total = total_of(state.loss) if state.scaler is None else state.scaler.scale(total_of(state.loss))
    run.backward(total, root_gradient(total, scale(), run.root_gradients))
    on.after_backward()
