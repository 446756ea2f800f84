"""The training loop: every event of training fires here, each at one place.

Reads from top to bottom like the pseudocode in `runner.event.Event`. There is no logging, timing, checkpointing or
stopping criterion here: those are callbacks. Nothing waits for the device, and the only collective per batch is the
gradient all-reduce (and, where a model weighs its loss by something other than samples, the sum of those weights).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.batch import split
from runner.distributed import all_reduce_gradients, any_rank, get_world_size
from runner.evaluation import evaluate_now
from runner.event import Event
from runner.interrupt import Interrupt
from runner.loss import Weight, detach, fractions, rank_share, total_of

if TYPE_CHECKING:
    from runner.trainer import Trainer


def fit(trainer: Trainer) -> None:
    """Train from the state's timestamp to `max_duration`. All ranks."""
    state, fire, stream = trainer.state, trainer.engine.run_event, trainer.train_stream
    state.unwrapped_model.train()
    trainer.pulse.resume()
    fire(Event.FIT_START)
    while state.timestamp < state.max_duration and not state.stop_requested:
        now = state.timestamp
        if now.epoch_in_iteration == 0 and now.batch_in_epoch == 0:
            fire(Event.ITERATION_START)
        if now.batch_in_epoch == 0:
            fire(Event.EPOCH_START)
        state.dataloader, state.dataloader_label, state.dataloader_len = stream.loader, "train", stream.length
        if not train_epoch(trainer, stream.start(now.epoch, now.batch_in_epoch)):
            break
        end_epoch(trainer)
    evaluate_now(trainer, [one for one in state.evaluators if trainer.owes(one)])
    fire(Event.FIT_END)


def train_epoch(trainer: Trainer, batches: Iterator[Any]) -> bool:
    """Train the rest of an epoch; return whether its end was reached."""
    state, fire, pulse = trainer.state, trainer.engine.run_event, trainer.pulse
    limit, unit = state.max_duration.value, state.max_duration.unit
    while True:
        fire(Event.BEFORE_DATALOADER)
        try:
            state.batch = next(batches)
        except StopIteration:
            break
        samples = trainer.train_stream.counts(
            state.timestamp.batch_in_epoch, state.unwrapped_model.num_samples(state.batch)
        )
        fire(Event.AFTER_DATALOADER)
        train_batch(trainer, *samples)
        fire(Event.BATCH_END)
        evaluate_now(trainer, [one for one in state.evaluators if trainer.is_due(one)])
        fire(Event.BATCH_CHECKPOINT)
        if pulse.signal:
            raise Interrupt.exception(pulse.signal)
        if state.stop_requested or state.timestamp.count(unit) >= limit:
            return state.timestamp.batch_in_epoch == trainer.train_stream.length
    if state.timestamp.batch_in_epoch == 0:
        raise ValueError(
            "train_dataloader yielded no batch in this epoch; a generator that is used up cannot be read again"
        )
    return True


def train_batch(trainer: Trainer, samples: int, all_samples: int) -> None:
    """Train `state.batch`, which is this rank's `samples` of `all_samples`: gradients, optimizer step, a step of time."""
    state, fire, scaler = trainer.state, trainer.engine.run_event, trainer.state.scaler
    fire(Event.BATCH_START)
    for rates in trainer.rates:
        rates.step(state.progress)
    fire(Event.BEFORE_TRAIN_BATCH)
    state.batch_is_padding = samples == 0
    accumulate_gradients(trainer, rank_share(state.unwrapped_model, state.batch, samples, all_samples))
    if scaler is not None:
        for optimizer in state.optimizers:
            scaler.unscale_(optimizer)
    fire(Event.AFTER_TRAIN_BATCH)
    for optimizer in state.optimizers:
        # The scaler reads one flag back from the device here, as torch's own fp16 training does.
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    for scheduler in trainer.batch_schedulers:
        scheduler.step()
    tokens = state.unwrapped_model.num_tokens(state.batch)
    if tokens and samples != all_samples:
        tokens = tokens * all_samples // samples if samples else 0
    state.step_time(state.timestamp.to_next_batch(all_samples, tokens, trainer.pulse.beat()))


def end_epoch(trainer: Trainer) -> None:
    """Step time to the next epoch, and to the next iteration where one is complete."""
    state, fire = trainer.state, trainer.engine.run_event
    state.step_time(state.timestamp.to_next_epoch())
    for scheduler in trainer.epoch_schedulers:
        scheduler.step()
    fire(Event.EPOCH_END)
    evaluate_now(trainer, [one for one in state.evaluators if trainer.is_due(one)])
    fire(Event.EPOCH_CHECKPOINT)
    if trainer.iteration_is_complete():
        state.step_time(state.timestamp.to_next_iteration())
        fire(Event.ITERATION_END)
        fire(Event.ITERATION_CHECKPOINT)


def accumulate_gradients(trainer: Trainer, share: Weight) -> None:
    """Leave in `.grad` the gradient of the loss averaged over the whole batch of all ranks.

    Args:
        trainer: with `state.batch` set.
        share: this rank's part of it, see `rank_share`.
    """
    state = trainer.state
    if not state.auto_microbatching:
        train_microbatches(trainer, share)
        return
    # Running statistics must not see the microbatches of an attempt that ran out of memory.
    buffers = [(buffer, buffer.clone()) for buffer in state.unwrapped_model.buffers()]
    while True:
        size = state.microbatch_size = state.microbatch_size or state.unwrapped_model.num_samples(state.batch)
        out_of_memory = False
        try:
            train_microbatches(trainer, share)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            out_of_memory = True
        if not any_rank(out_of_memory):
            break
        trainer.shrink_microbatches()
        for buffer, before in buffers:
            buffer.copy_(before)
    if get_world_size() > 1:
        all_reduce_gradients(state.model.parameters())


def train_microbatches(trainer: Trainer, share: Weight) -> None:
    """Run forward, loss and backward of each microbatch, weighed so that their gradients add up to the batch's."""
    state, model = trainer.state, trainer.state.unwrapped_model
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)
    state.microbatch, state.microbatch_start = state.batch, 0
    if state.grad_accum == 1 and state.microbatch_size is None:
        train_microbatch(trainer, 0, share)
        state.total_loss, state.loss_parts = detach(state.loss)
        return
    microbatches = split(state.batch, model.num_samples(state.batch), state.grad_accum, state.microbatch_size)
    parts = fractions(model, [microbatch for _, microbatch in microbatches])
    losses = []
    for index, (start, microbatch) in enumerate(microbatches):
        state.microbatch, state.microbatch_start = microbatch, start
        is_last = index == len(microbatches) - 1
        with nullcontext() if is_last and not state.auto_microbatching else trainer.unsynchronized():
            train_microbatch(trainer, index, parts[index] * share)
        losses.append(detach(state.loss))
    state.total_loss = sum(total * part for (total, _), part in zip(losses, parts, strict=True))
    state.loss_parts = {
        name: sum(named[name] * part for (_, named), part in zip(losses, parts, strict=True)) for name in losses[0][1]
    }


def train_microbatch(trainer: Trainer, index: int, scale: Weight) -> None:
    """Run forward, loss and backward of `state.microbatch`, its loss multiplied by `scale`."""
    state, fire, model = trainer.state, trainer.engine.run_event, trainer.state.unwrapped_model
    fire(Event.BEFORE_FORWARD)
    trainer.forward_stream.start(state.timestamp.batch, index)
    if model.training_step is not None:
        state.loss_scale = (
            scale if state.scaler is None else state.scaler.scale(torch.ones((), device=state.device)) * scale
        )
        with trainer.autocast():
            state.loss = model.training_step(state)
        fire(Event.AFTER_BACKWARD)
        return
    with trainer.autocast():
        state.outputs = state.model(state.microbatch)
    fire(Event.AFTER_FORWARD)
    fire(Event.BEFORE_LOSS)
    with trainer.autocast():
        state.loss = model.loss(state.outputs, state.microbatch)
    fire(Event.AFTER_LOSS)
    fire(Event.BEFORE_BACKWARD)
    total = total_of(state.loss)
    if isinstance(scale, Tensor):
        total = total * scale.to(total.dtype)
    elif scale != 1.0:
        total = total * scale
    (total if state.scaler is None else state.scaler.scale(total)).backward()
    fire(Event.AFTER_BACKWARD)
