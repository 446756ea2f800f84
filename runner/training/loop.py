"""The training loop: every event of a batch and of an epoch's start fires here, each at one place.

Read it beside the pseudocode in `runner.Event`. There is no logging, timing, checkpointing or early stopping
here: those are callbacks. Nothing waits for the device, and the one collective per batch is the all-reduce of gradients
(and a sum over ranks of what models and algorithms ask for: the weights of a loss that is no mean over samples, tokens
where samples are left out).
"""

from __future__ import annotations

from runner.models.beginning import begin_training
from runner.models.loss import rank_share
from runner.training.dataloader import BatchStream
from runner.training.epochs import catch_up, end_epoch, start_epoch
from runner.training.evaluation import evaluate_now
from runner.training.run import Run


def fit(run: Run) -> None:
    """Train from the state's timestamp to `max_duration`. All ranks."""
    state = run.state
    stream = run.train_stream
    assert stream is not None  # the Trainer has checked it
    begin_training(state)
    state.stream = stream
    stream.seek(state.timestamp.epoch, state.timestamp.batch_in_epoch)
    state.train_dataloader_len = stream.length  # a resumed run may continue in an epoch of another length
    run.clock.start()
    run.on.fit_start()
    catch_up(run)  # after FIT_START, so that callbacks are ready for what a resumed run still owes
    while state.timestamp < state.max_duration and not state.stop_requested:
        run.end_where_interrupted()  # at FIT_START, or at the end of an epoch
        if state.timestamp.batch_in_epoch == 0:
            start_epoch(run)
        run.follow_freezing()  # hooks may have frozen layers, or unfrozen them
        if not train_epoch(run, stream):
            break  # in the middle of an epoch, which therefore has no end
        end_epoch(run)
    evaluate_now(run, [one for one in state.evaluators if one.is_owed(state)])  # the final weights have values too
    run.on.fit_end()
    run.clock.stop()
    run.end_where_interrupted()  # a signal that came after the last batch


def train_epoch(run: Run, stream: BatchStream) -> bool:
    """Train the rest of an epoch; return whether its end was reached."""
    state = run.state
    on = run.on
    # After EPOCH_START, at which a callback or algorithm may still change how the data is read.
    batches = stream.start(state.timestamp.epoch, state.timestamp.batch_in_epoch)
    state.train_dataloader_len = stream.length
    evaluators = [one for one in state.evaluators if not getattr(one.eval_interval, "ends_epochs", False)]
    while True:
        on.before_dataloader()
        try:
            state.batch = next(batches)
        except StopIteration:
            break
        samples, all_samples = stream.counts(state.timestamp.batch_in_epoch, state.batch)
        on.after_dataloader()  # the batch is on the device: the place to augment it
        train_batch(run, samples, all_samples)
        if run.freezing.is_new:
            run.freezing.check_gradients()
        if evaluators:
            evaluate_now(run, [one for one in evaluators if one.is_due(state)])
        on.batch_checkpoint()  # after the evaluation, so that a checkpoint holds its values and can be chosen by them
        run.end_where_interrupted()  # after the checkpoint event, so that nothing is saved twice
        end = state.max_duration  # an algorithm may have changed it
        if state.stop_requested or state.timestamp.count(end.unit) >= end.value:
            return state.timestamp.batch_in_epoch == stream.length
    if state.timestamp.batch_in_epoch == 0:
        raise ValueError("train_dataloader yielded no batch in this epoch; an exhausted generator cannot be read again")
    return True


def train_batch(run: Run, samples: int, all_samples: int) -> None:
    """Train `state.batch`: gradients, optimizer step, step of time.

    Args:
        run: the run, with `state.batch` set.
        samples: this rank's; 0 where the batch only stands in for an empty share.
        all_samples: samples in the batch over all ranks.
    """
    state = run.state
    on = run.on
    on.batch_start()
    for rates in run.rates:  # before the batch, so that its step uses the rate for its position in training
        rates.step(state.progress)
    on.before_train_batch()  # algorithms change the batch here, so its share is worked out after it
    state.batch_is_padding = samples == 0
    share = rank_share(state.unwrapped_model, state.batch, samples, all_samples, run.world_size, run.weighs_by_samples)
    state.is_consistent &= not run.has_buffers  # a forward pass may change them, and the batch is not trained yet
    for parameter in run.parameters:  # only now, so that callbacks can look at gradients until the next batch
        parameter.grad = None
    run.accumulate(run, share)
    run.steps.finish_gradients()  # average over ranks and unscale, where backward did not
    on.after_train_batch()  # gradients are final: the place to clip or to look at them
    state.is_consistent = False  # and it stays so if the batch fails
    run.steps.step()
    # Time moves last: until here, intervals and schedules still see the batch as not trained.
    tokens = run.count_tokens(samples, all_samples)
    state.step_time(state.timestamp.to_next_batch(all_samples, tokens, run.clock.beat()))
    on.batch_end()  # the first event at which the batch counts as trained
    state.is_consistent = True
