"""`runner`, or `runner train`: trains the experiment that the config describes, in a new folder of outputs/.

The folder keeps the config, the command, uncommitted code, checkpoints, and the result. With `-m`, it trains one job
for each combination of values that are separated by commas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config import build
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.config.length import check_length
from runner.distributed.environment import is_rank_zero
from runner.failures.errors import Pruned, SessionOver
from runner.failures.exits import exits_as_failures
from runner.history.optimizer_changes import change_optimizers
from runner.history.restarting import restarting
from runner.records.job import Job
from runner.records.recording import check_converged, check_objective, check_unfinished, diverging, recording, timing
from runner.records.result import Objective, objectives_of
from runner.records.write import log_record
from runner.timing.event import Event
from runner.training.final_test import check_test, evaluate_test_data

if TYPE_CHECKING:
    from runner.core.state import State
    from runner.training.trainer import Trainer


def run(job: Job) -> Objective:
    """Train, and return the objective or objectives. All ranks."""
    return train(job)


def train(job: Job, begin: Callable[[Job], str] | None = None) -> Objective:
    """Build the Trainer of a job, train, and return the objective or objectives. All ranks.

    `begin` makes the checkpoint to continue from, perhaps by training, and returns its folder.

    Raises:
        WrongConfig: training cannot begin as configured.
        Diverged: the last loss or the objective is not finite, and `--allow-divergence` was not typed; or a callback or
            an algorithm, such as NaNMonitor, ended the run for that reason.
    """
    with suppress(Pruned), diverging(), recording(job) as result, exits_as_failures(), restarting(job):
        with config_errors():
            job = replace(job, experiment=settled(job.experiment, job.resume))
            if begin is not None:
                job = replace(job, resume=begin(job))
            trainer = build.build(job.experiment, Path(job.run_dir), job.run_name, job.resume)
        # Imports torch, which `build` has imported by now.
        from runner.records.evaluation import describe_evaluators, warn_of_other_data
        from runner.trials.diagnosis import noting_first_batch, refusing_first_batch

        with trainer:
            with config_errors():
                change_optimizers(trainer.state, job.experiment.plain)
                record(trainer, job)
                if result.evaluation and is_rank_zero():  # an earlier session has evaluated
                    warn_of_other_data(result.evaluation, describe_evaluators(trainer.state))
            trainer.error_context = partial(timing, result, partial(noting_first_batch, job, trainer.state))
            with config_errors(Event.FIT_START), refusing_first_batch(), pausing(trainer.state):
                try:
                    trainer.fit(may_be_over=job.may_be_over)
                except Pruned:
                    result.measure(trainer.state, job.experiment.objective)
                    result.reported = [*result.objectives.values()]
                    raise
                except (KeyboardInterrupt, SystemExit):  # killed or paused: the table of runs shows how far it got
                    result.take_metrics(trainer.state)
                    raise
            result.tested = evaluate_test_data(trainer, job.experiment.test)
            result.measure(trainer.state, job.experiment.objective)
            if not job.command.options["allow_divergence"]:
                check_converged(trainer.state, result)
    return result.answer


def settled(experiment: Experiment, resume: str | None) -> Experiment:
    """Return an experiment whose budget, if any, is converted to a number of batches. All ranks."""
    if experiment.budget is None:
        return experiment
    from runner.trials.measure import settle_budget  # imports torch

    return settle_budget(experiment, resume)


@contextmanager
def pausing(state: State) -> Iterator[None]:
    """If the session ends within the context, check that the run can continue from there. All ranks.

    Raises:
        RuntimeError: the last checkpoint could not be written, or its values were not finite.
    """
    from runner.checkpoints.snapshot import read_timestamp

    try:
        yield
    except Pruned:
        raise  # a run without a checkpoint is revived from the start
    except SessionOver as over:
        saved = [callback.latest for callback in state.callbacks if getattr(callback, "latest", None) is not None]  # type: ignore[attr-defined]
        if is_rank_zero() and all(read_timestamp(path).batch != state.timestamp.batch for path in saved):
            lost = f"no checkpoint was written after batch {state.timestamp.batch}"
            raise RuntimeError(f"the session is over, and {lost}: it would be repeated forever") from over
        raise


def record(trainer: Trainer, job: Job) -> None:
    """Record how a run was made, once it is certain that training can begin. All ranks."""
    from runner.training.arguments import check_trainable

    state = trainer.state
    end = state.max_duration
    check_unfinished(state, job.may_be_over)
    check_trainable(state, job.may_be_over)
    experiment = job.experiment
    check_length(experiment, end, state.train_dataloader_len)
    check_objective(state, experiment.objective)
    check_test(state, experiment.test, objectives_of(experiment.objective))
    log_record(trainer.logger, job, state.resumed_from)
