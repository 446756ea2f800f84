"""`runner eval RUN`: evaluates the weights of a saved run, and trains nothing.

Without RUN, `runner eval model=... data=...` evaluates an untrained model: a baseline, which `verdict` and `table` can
compare with trained runs.

It uses the weights that the run's own evaluations used: if an algorithm averages weights, the average. Test data is
evaluated only if the key `test` asks for it: `test=last`, or `test=best` for the best checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli.command_line import key_of
from runner.config import build
from runner.config.errors import config_errors
from runner.records.folder import run_folder_of
from runner.records.job import Job
from runner.records.recording import check_objective, recording, timing
from runner.records.result import Objective, read_result
from runner.records.write import log_record
from runner.terminal.console import print_block, show_path
from runner.training.final_test import check_test_data

if TYPE_CHECKING:
    from runner.core.state import State
    from runner.training.evaluator import Evaluator
    from runner.training.trainer import Trainer


def run(job: Job) -> Objective:
    """Run the evaluators on the weights of a run, print the metrics, and return the objective. All ranks."""
    # Imports torch.
    from runner.records.evaluation import warn_of_other_data
    from runner.trials.diagnosis import refusing_first_batch

    with recording(job) as result:
        with trainer_with_weights(job) as trainer:
            with config_errors():
                check_objective(trainer.state, job.experiment.objective)
                evaluators = _to_evaluate(trainer.state, job.experiment.test)
            trainer.error_context = partial(timing, result, trainer.error_context)
            with refusing_first_batch():
                values = trainer.eval(evaluators)
        result.measure(trainer.state, job.experiment.objective)
        warn_of_other_data(_recorded_evaluation(job), result.evaluation)
    rows = [(f"{label}/{name}", value) for label, metrics in values.items() for name, value in metrics.items()]
    print_results(job, trainer, rows)
    return result.answer


def _recorded_evaluation(job: Job) -> Mapping[str, str]:
    """Return how the run that made the weights was evaluated; empty if that is unknown, or other data was typed."""
    load_path = job.experiment.trainer.get("load_path")
    has_own_data = any(key_of(override).split(".")[0] in ("data", "experiment") for override in job.command.overrides)
    folder = None if load_path is None or has_own_data else run_folder_of(load_path)
    result = None if folder is None else read_result(folder)
    return {} if result is None else result.evaluation


def _to_evaluate(state: State, test: str | None) -> list[Evaluator] | None:
    """Return the evaluators to run, or None if the run has none."""
    if test is not None:
        check_test_data(state, test)
        return [*state.evaluators]
    evaluators = [evaluator for evaluator in state.evaluators if not evaluator.is_test]
    if state.evaluators and not evaluators:
        raise ValueError("test=None: this run has test data only; give test=last to evaluate it")
    return evaluators or None


@contextmanager
def trainer_with_weights(job: Job, new_rows: Any = None) -> Iterator[Trainer]:
    """Record the run, and yield a job's Trainer with its timestamp set to when the weights were saved.

    With a loader of `new_rows`, the run's own data is not read.
    """
    from runner.checkpoints.snapshot import read_timestamp
    from runner.trials.diagnosis import noting_first_batch

    with config_errors():
        trainer = build.build(job.experiment, Path(job.run_dir), job.run_name, new_rows=new_rows)
    with trainer:
        # Metrics are logged at the same batch as those of the saved run.
        load_path = job.experiment.trainer.get("load_path")
        if load_path is not None and (path := Path(load_path)).is_dir():
            trainer.state.timestamp = trainer.state.previous_timestamp = read_timestamp(path)
        with config_errors():
            log_record(trainer.logger, job)
        trainer.error_context = partial(noting_first_batch, job, trainer.state)
        yield trainer


def print_results(job: Job, trainer: Trainer, rows: Sequence[tuple[str, Any]]) -> None:
    """Print results, the folder of the run, and the commands that show it. All ranks; rank 0 prints."""
    from runner.distributed.ranks import get_global_rank
    from runner.training.metrics import scalars

    if get_global_rank() != 0:
        return
    state = trainer.state
    load_path = job.experiment.trainer.get("load_path")
    when = f", after {state.timestamp.batch} batches" if load_path is not None and Path(load_path).is_dir() else ""
    weights = "the initial weights of the model" if load_path is None else show_path(Path(load_path))
    lines = [("weights", f"{weights}{when}")]
    for label, value in rows:
        if isinstance(value, str):
            lines.append((label, value))
        else:
            lines += [(key, f"{float(number):.6g}") for key, number in scalars(label, value).items()]
    lines.append(("run", show_path(state.run_dir)))
    has_values = any(not isinstance(value, str) for _, value in rows)  # files of predictions cannot be compared there
    destinations = trainer.logger.destinations if has_values else ()
    commands = (getattr(destination, "ui_command", None) for destination in destinations)
    lines += [("compare", command) for command in commands if command]
    print_block("", lines)
