"""The steps between epochs: their starts and ends, the ends of iterations, and what a resumed run must catch up on."""

from __future__ import annotations

from runner.training.evaluation import evaluate_now
from runner.training.run import Run


def catch_up(run: Run) -> None:
    """Do what an earlier session left undone at the point where this one continues. All ranks.

    A checkpoint may have been taken where a callback failed at the end of an epoch, where an evaluation failed, or
    before the end of an iteration.
    """
    state = run.state
    if state.resumed_from is not None:
        with state.changing(settles=state.is_consistent):
            run.engine.fire_unhandled()
        evaluate_now(run, [one for one in state.evaluators if one.is_due(state) and one.is_owed(state)])
    now = state.timestamp
    if now.epoch_in_iteration and now.batch_in_epoch == 0 and run.iteration_is_complete():
        end_iteration(run)


def start_epoch(run: Run) -> None:
    """Fire the events of an epoch's start, and before them those of an iteration's."""
    # Not settled before the first batch has been trained: a run resumed here would fire these events again.
    with run.state.changing(settles=False):
        if run.state.timestamp.epoch_in_iteration == 0:
            run.on.iteration_start()
        run.on.epoch_start()


def end_epoch(run: Run) -> None:
    """Step time to the next epoch, and end the iteration where it is complete."""
    state = run.state
    with state.changing():
        state.step_time(state.timestamp.to_next_epoch())
        for scheduler in run.epoch_schedulers:
            scheduler.step()
        run.on.epoch_end()
    evaluate_now(run, [one for one in state.evaluators if one.is_due(state)])
    run.on.epoch_checkpoint()
    if run.iteration_is_complete():
        end_iteration(run)


def end_iteration(run: Run) -> None:
    """Step time to the next iteration."""
    state = run.state
    with state.changing():
        state.step_time(state.timestamp.to_next_iteration())
        run.on.iteration_end()
    run.on.iteration_checkpoint()
