"""Starts and ends of epochs and iterations, and the events and evaluations that an earlier session missed."""

from __future__ import annotations

from runner.training.evaluation import evaluate_now
from runner.training.run import Run


def catch_up(run: Run) -> None:
    """Fire the events and run the evaluations that an earlier session missed. Call it on all ranks.

    That session may have saved its checkpoint after a callback failed at the end of an epoch, after an evaluation
    failed, or before the end of an iteration.
    """
    state = run.state
    if state.resumed_from is not None:
        with state.changing(settles=state.is_consistent):
            run.engine.fire_unhandled()
        evaluate_now(run, [evaluator for evaluator in state.due_evaluators() if evaluator.is_owed(state)])
    if state.timestamp.epoch_in_iteration and state.timestamp.batch_in_epoch == 0 and run.is_iteration_complete():
        end_iteration(run)


def start_epoch(run: Run) -> None:
    """Fire EPOCH_START, and before it ITERATION_START if an iteration begins."""
    # The state stays inconsistent until the first batch is trained: a run resumed here would fire these events again.
    with run.state.changing(settles=False):
        if run.hook_stream is not None:
            run.hook_stream.start(run.state.timestamp.batch, microbatch=1)  # not the numbers of the first batch
        if run.state.timestamp.epoch_in_iteration == 0:
            run.on.iteration_start()
        run.on.epoch_start()


def end_epoch(run: Run) -> None:
    """Advance time to the next epoch, and end the iteration if it is complete."""
    state = run.state
    with state.changing():
        state.step_time(state.timestamp.to_next_epoch())
        for scheduler in run.epoch_schedulers:
            scheduler.step()
        run.on.epoch_end()
    evaluate_now(run, state.due_evaluators())
    run.on.epoch_checkpoint()
    if run.is_iteration_complete():
        end_iteration(run)


def end_iteration(run: Run) -> None:
    """Advance time to the next iteration."""
    state = run.state
    with state.changing():
        state.step_time(state.timestamp.to_next_iteration())
        run.on.iteration_end()
    run.on.iteration_checkpoint()
