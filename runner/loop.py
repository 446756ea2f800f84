"""The training loop: every event of training fires here, each at one place.

Reads from top to bottom like the pseudocode in `runner.event.Event`. There is no logging, timing, checkpointing or
stopping criterion here: those are callbacks. Nothing waits for the device, and the only collective per batch is the
gradient all-reduce (and sums over the ranks of what their models and algorithms say that they need: the weights of a
loss that is no mean over samples, and the tokens that are trained where samples are left out).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from runner.batch import split
from runner.distributed.collectives import all_reduce_sum, any_rank
from runner.distributed.signals import Interrupt
from runner.evaluation import evaluate_now
from runner.loss import Weight, check_loss, detach, fractions, rank_share, scaled_total, weighted_sum

if TYPE_CHECKING:
    from runner.trainer import Trainer

log = logging.getLogger("runner")

NO_MEMORY = re.compile(r"CU(BLAS|DNN)_STATUS_\w*ALLOC|CUBLAS_STATUS_NOT_INITIALIZED|CUDA error: out of memory")


def fit(trainer: Trainer) -> None:
    """Train from the state's timestamp to `max_duration`. All ranks."""
    state, on, stream = trainer.state, trainer.engine.on, trainer.train_stream
    state.unwrapped_model.train()
    state.dataloader, state.dataloader_label, state.dataloader_len = stream.loader, "train", stream.length
    trainer.pulse.start()
    on.fit_start()
    if state.resumed_from is not None:  # from a checkpoint of an epoch's end or an evaluation that failed
        trainer.engine.tell_unheard()
        evaluate_now(trainer, [one for one in state.evaluators if one.is_due(state) and one.is_owed(state)])
    now = state.timestamp
    if now.epoch_in_iteration and now.batch_in_epoch == 0 and trainer.iteration_is_complete():
        end_iteration(trainer)  # resumed from the EPOCH_CHECKPOINT before it
    while state.timestamp < state.max_duration and not state.stop_requested:
        now = state.timestamp
        if now.batch_in_epoch == 0:
            state.is_whole = False  # a resumed run fires these again
            if now.epoch_in_iteration == 0:
                on.iteration_start()
            on.epoch_start()
        if not train_epoch(trainer, stream.start(now.epoch, now.batch_in_epoch)):
            break
        end_epoch(trainer)
    evaluate_now(trainer, [one for one in state.evaluators if one.is_owed(state)])
    on.fit_end()
    trainer.pulse.stop()
    if trainer.pulse.signal:
        state.ended_between_batches = True
        raise Interrupt.exception(trainer.pulse.signal)


def train_epoch(trainer: Trainer, batches: Iterator[Any]) -> bool:
    """Train the rest of an epoch; return whether its end was reached."""
    state, on, pulse, stream = trainer.state, trainer.engine.on, trainer.pulse, trainer.train_stream
    limit, unit = state.max_duration.value, state.max_duration.unit
    while True:
        on.before_dataloader()
        try:
            state.batch = next(batches)
        except StopIteration:
            break
        samples, all_samples = stream.counts(state.timestamp.batch_in_epoch, state.batch)
        on.after_dataloader()
        train_batch(trainer, samples, all_samples)
        on.batch_end()
        state.is_whole = True
        if state.evaluators:
            evaluate_now(trainer, [one for one in state.evaluators if one.is_due(state)])
        on.batch_checkpoint()
        if pulse.signal:
            state.ended_between_batches = True
            raise Interrupt.exception(pulse.signal)
        if state.stop_requested or state.timestamp.count(unit) >= limit:
            return state.timestamp.batch_in_epoch == stream.length
    if state.timestamp.batch_in_epoch == 0:
        raise ValueError("train_dataloader yielded no batch in this epoch; a used-up generator cannot be read again")
    return True


def train_batch(trainer: Trainer, samples: int, all_samples: int) -> None:
    """Train `state.batch`, which is this rank's `samples` of `all_samples`: gradients, optimizer step, step of time."""
    state, on = trainer.state, trainer.engine.on
    on.batch_start()
    for rates in trainer.rates:
        rates.step(state.progress)
    on.before_train_batch()
    state.batch_is_padding = samples == 0
    share = rank_share(state.unwrapped_model, state.batch, samples, all_samples, trainer.world_size)
    state.is_whole = state.is_whole and not trainer.has_buffers  # which a forward pass may change
    for parameter in trainer.parameters:
        parameter.grad = None
    trainer.accumulate_gradients(trainer, share)
    trainer.steps.finish_gradients()
    on.after_train_batch()
    state.is_whole = False
    trainer.steps.step()
    tokens = state.unwrapped_model.num_tokens(state.batch)
    if tokens and trainer.sums_tokens:
        tokens = int(all_reduce_sum(torch.tensor(tokens if samples else 0)))  # on the host
    elif tokens and samples != all_samples:
        tokens = tokens * all_samples // max(1, samples)  # what stands in for an empty share is one sample
    state.step_time(state.timestamp.to_next_batch(all_samples, tokens, trainer.pulse.beat()))


def end_epoch(trainer: Trainer) -> None:
    """Step time to the next epoch, and end the iteration where it is complete."""
    state, on = trainer.state, trainer.engine.on
    state.is_whole = False
    state.step_time(state.timestamp.to_next_epoch())
    for scheduler in trainer.epoch_schedulers:
        scheduler.step()
    on.epoch_end()
    state.is_whole = True
    evaluate_now(trainer, [one for one in state.evaluators if one.is_due(state)])
    on.epoch_checkpoint()
    if trainer.iteration_is_complete():
        end_iteration(trainer)


def end_iteration(trainer: Trainer) -> None:
    """Step time to the next iteration."""
    state, on = trainer.state, trainer.engine.on
    state.is_whole = False
    state.step_time(state.timestamp.to_next_iteration())
    on.iteration_end()
    state.is_whole = True
    on.iteration_checkpoint()


def whole_batch(trainer: Trainer, share: Weight) -> None:
    """Add to `.grad` the gradient of the loss averaged over the batch of all ranks, in one forward and backward.

    Args:
        trainer: with `state.batch` set.
        share: this rank's part of the batch, see `rank_share`.
    """
    state = trainer.state
    state.microbatch = state.batch
    train_microbatch(trainer, 0, share)
    state.total_loss, state.loss_parts = detach(state.loss)


def in_microbatches(trainer: Trainer, share: Weight) -> None:
    """Do what `whole_batch` does a slice at a time, weighed so that the gradients add up to the whole batch's."""
    state, model = trainer.state, trainer.state.unwrapped_model
    microbatches = split(state.batch, model.num_samples(state.batch), state.grad_accum, state.microbatch_size)
    parts = fractions(model, [microbatch for _, microbatch in microbatches])
    losses = []
    for index, (state.microbatch_start, state.microbatch) in enumerate(microbatches):
        is_last = index == len(microbatches) - 1
        with nullcontext() if is_last and trainer.reduces_in_backward else trainer.unsynchronized():
            train_microbatch(trainer, index, parts[index] * share)
        losses.append(detach(state.loss))
    state.total_loss, state.loss_parts = weighted_sum(losses, parts)


def in_fitting_microbatches(trainer: Trainer, share: Weight) -> None:
    """Do what `in_microbatches` does, and again with halved ones when a rank runs out of memory, with equal numbers."""
    state = trainer.state
    # Running statistics must not see the microbatches of an attempt that failed.
    buffers = [(buffer, buffer.clone()) for buffer in state.unwrapped_model.buffers()]
    while True:
        size = state.microbatch_size = state.microbatch_size or state.unwrapped_model.num_samples(state.batch)
        out_of_memory = False
        try:
            in_microbatches(trainer, share)
        except RuntimeError as error:
            if size == 1 or not is_out_of_memory(error):
                raise
            out_of_memory = True
        if not any_rank(out_of_memory):
            break
        state.microbatch_size = max(1, size // 2)
        log.warning("out of memory with microbatches of %d samples: done again with %d", size, state.microbatch_size)
        state.outputs, state.loss = None, {}  # which would keep all that the failed attempt computed
        for parameter in trainer.parameters:
            parameter.grad = None
        if state.device.type == "cuda":
            torch.cuda.empty_cache()
        for buffer, before in buffers:
            buffer.copy_(before)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that the device has no memory left: torch's allocator, cuBLAS or cuDNN."""
    return isinstance(error, torch.OutOfMemoryError) or NO_MEMORY.search(str(error)) is not None


def checked(trainer: Trainer, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that looks at the first loss that is trained, and then leaves its place to `compute`.

    Args:
        trainer: has the function under `name`.
        name: of the model's method: 'loss' or 'training_step'.
        compute: that method, under autocast.
    """

    def compute_and_check(*arguments: Any) -> Any:
        loss, trains = compute(*arguments), torch.is_grad_enabled()
        check_loss(loss, f"{type(trainer.state.unwrapped_model).__name__}.{name}", trains and name == "loss")
        if trains:
            setattr(trainer, name, compute)
        return loss

    return compute_and_check


def train_microbatch(trainer: Trainer, index: int, scale: Weight) -> None:
    """Run forward, loss and backward of `state.microbatch`, its loss multiplied by `scale`."""
    state, on = trainer.state, trainer.engine.on
    on.before_forward()
    trainer.forward_stream.start(state.timestamp.batch, index)
    if trainer.training_step is not None:
        scaled = scale if state.scaler is None else state.scaler.scale(torch.ones((), device=state.device)) * scale
        state.loss_scale = scaled
        state.loss = trainer.training_step(state)
        on.after_backward()
        return
    state.outputs = trainer.forward(state.microbatch)
    on.after_forward()
    on.before_loss()
    state.loss = trainer.loss(state.outputs, state.microbatch)
    on.after_loss()
    on.before_backward()
    loss = scaled_total(state.loss, scale)
    (loss if state.scaler is None else state.scaler.scale(loss)).backward()
    on.after_backward()
