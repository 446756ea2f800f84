"""The training loop. Read it beside the pseudocode in `runner.Event`.

The events of a fit and of a batch fire here, each in one place; those of epochs fire in `epochs`, and those of
microbatches in `accumulation`. Logging, timing, checkpoints and early stopping are callbacks. Nothing here waits for
the device. The only collective per batch is the all-reduce of gradients. If models or algorithms need it, ranks also
sum loss weights (for a loss that is not a mean over samples) or tokens (if samples are left out).
"""

from __future__ import annotations

from runner.models.loss import rank_share
from runner.models.training_mode import begin_training
from runner.training.dataloader import BatchStream
from runner.training.epochs import catch_up, end_epoch, start_epoch
from runner.training.evaluation import evaluate_now
from runner.training.run import Run


def fit(run: Run) -> None:
    """Train from the state's timestamp to `max_duration`. Call it on all ranks."""
    state = run.state
    stream = run.train_stream
    assert stream is not None  # the Trainer has checked it
    begin_training(state)
    state.stream = stream
    stream.seek(state.timestamp.epoch, state.timestamp.batch_in_epoch)
    state.train_dataloader_len = stream.length  # a resumed run may continue in an epoch of another length
    run.clock.start()
    run.on.fit_start()
    catch_up(run)  # only in a resumed run, or after a fit that ended within an iteration
    while state.timestamp < state.max_duration and not state.stop_requested:
        run.end_if_interrupted()  # only if interrupted at FIT_START, or at the end of an epoch
        if state.timestamp.batch_in_epoch == 0:  # not if training continues in the middle of an epoch
            start_epoch(run)
        run.follow_freezing()  # once per epoch: hooks may have frozen or unfrozen layers
        if not train_epoch(run, stream):
            break  # training ended in the middle of an epoch, so EPOCH_END does not fire
        end_epoch(run)
    evaluate_now(run, state.owed_evaluators())  # once per fit: values of the final weights
    run.on.fit_end()
    run.clock.stop()
    run.end_if_interrupted()  # only if a signal came after the last batch


def train_epoch(run: Run, stream: BatchStream) -> bool:
    """Train the remaining batches of an epoch, and return whether the epoch is complete."""
    state = run.state
    on = run.on
    # After EPOCH_START, because its hooks may still change how the data is read.
    batches = stream.start(state.timestamp.epoch, state.timestamp.batch_in_epoch)
    state.train_dataloader_len = stream.length
    evaluates_mid_epoch = any(evaluator.runs_mid_epoch for evaluator in state.evaluators)
    while True:
        on.before_dataloader()
        try:
            state.batch = next(batches)
        except StopIteration:
            break
        samples, all_samples = stream.counts(state.timestamp.batch_in_epoch, state.batch)
        if run.hook_stream is not None:  # only with algorithms of the user's own
            run.hook_stream.start(state.timestamp.batch)
        on.after_dataloader()  # the batch is on the device: augment it here
        train_batch(run, samples, all_samples)
        if run.freezing.needs_check:  # only after the first batch, and when hooks have frozen or unfrozen layers
            run.freezing.check_gradients()
        if evaluates_mid_epoch and (evaluators := state.due_evaluators()):  # only when one is due
            evaluate_now(run, evaluators)
        on.batch_checkpoint()  # after the evaluation, so that checkpoints hold its values and can be ranked by them
        run.end_if_interrupted()  # only after a signal; the checkpoint event came first, so that nothing is saved twice
        end = state.max_duration  # read for each batch, because an algorithm may change it
        if state.stop_requested or state.timestamp.count(end.unit) >= end.value:
            return state.timestamp.batch_in_epoch == stream.length
    if state.timestamp.batch_in_epoch == 0:
        raise ValueError("train_dataloader yielded no batch in this epoch; an exhausted generator cannot be read again")
    return True


def train_batch(run: Run, samples: int, all_samples: int) -> None:
    """Train on `state.batch`: compute gradients, step the optimizers, and advance time.

    `state.is_consistent` is False from the first change of weights or buffers until the end of BATCH_END. After an
    error in between, no checkpoint is saved, because the weights no longer match the timestamp.

    Args:
        run: the run, with `state.batch` set.
        samples: number of samples on this rank; 0 if the batch only stands in for an empty share.
        all_samples: number of samples over all ranks.
    """
    state = run.state
    on = run.on
    on.batch_start()
    for rates in run.rates:  # before the step, so that batch n uses the learning rate at time n
        rates.step(state.progress)
    on.before_train_batch()  # algorithms may change the batch here, so its share is computed afterwards
    state.batch_is_padding = samples == 0
    share = rank_share(state.unwrapped_model, state.batch, samples, all_samples, run.world_size, run.weighs_by_samples)
    state.is_consistent &= not run.has_buffers  # the forward pass may change running statistics
    for parameter in run.parameters:  # not earlier, so that callbacks can read gradients until the next batch
        parameter.grad = None
    run.accumulate(run, share)  # forward, loss and backward of each microbatch, with their events
    run.steps.finish_gradients()  # averages over ranks and unscales, unless backward did so
    on.after_train_batch()  # gradients are final: clip or inspect them here
    state.is_consistent = False
    run.steps.step()
    # Time advances last: until here, intervals and schedules see the batch as not yet trained.
    tokens = run.count_tokens(samples, all_samples)
    state.step_time(state.timestamp.to_next_batch(all_samples, tokens, run.clock.beat()))
    on.batch_end()  # the first event that counts the batch as trained
    state.is_consistent = True
