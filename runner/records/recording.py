"""Records the result of a run at its start and end, and decides what counts as a failure."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli.nearest import nearest
from runner.config.length import unmeasured
from runner.distributed.environment import is_rank_zero
from runner.failures.errors import Diverged, SessionOver, WrongConfig, WrongKey
from runner.failures.facts import facts_of
from runner.files.addresses import hidden_everywhere
from runner.files.names import RESULT
from runner.records.job import Job
from runner.records.load import LoadMeter
from runner.records.record import Record
from runner.records.result import TIME, Result, objectives_of, read_result
from runner.terminal.answer import set_fields
from runner.timing.time import TimeUnit
from runner.training.metric_choice import metrics_named

if TYPE_CHECKING:
    from runner.core.state import State

log = logging.getLogger("runner")

PARENT = "runner.parent"
"""Tag that holds the folder of the parent run."""
FORKED_AT = "runner.forked_at"
"""Tag that holds the batch after which a fork begins."""


def check_unfinished(state: State, may_be_over: bool = False) -> None:
    """Raise a ValueError if a run has nothing left to train; with `may_be_over`, only if it has trained for longer."""
    now = state.timestamp
    end = state.max_duration
    trained = now.get(end.unit)
    is_longer = end.unit in (TimeUnit.EPOCH, TimeUnit.BATCH) and trained > end  # runs overshoot other units
    if is_longer or (now >= end and not may_be_over):
        reason = f"this run has trained {trained} already" if is_longer else "this run has finished"
        raise ValueError(
            f"trainer.max_duration={str(end)!r} is reached: {reason}. To train it for longer, add "
            f"trainer.max_duration=<more than {trained}>"
        )


def check_converged(state: State, result: Result) -> None:
    """Raise if a finished run has diverged. All ranks; they raise together.

    Raises:
        Diverged: the last loss on any rank, or the objective, is not finite.
    """
    from runner.distributed.collectives import any_rank

    loss = float(getattr(state, "total_loss", 0.0))  # a run that was already complete trains no batch
    reason = f"the loss of the last batch is {loss}"
    if not any_rank(not math.isfinite(loss)):
        nonfinite = {name: value for name, value in result.objectives.items() if not math.isfinite(value)}
        if not nonfinite:
            return
        reason = " and ".join(f"objective {name} is {value}" for name, value in nonfinite.items())
    elif math.isfinite(loss):
        reason = "the loss of the last batch is not finite on another rank"
    raise Diverged(
        f"the run has diverged: {reason}. Lower the learning rate, warm it up, or clip gradients "
        "(+algorithms=gradient_clipping), or look for nan in the data; --allow-divergence accepts such a run"
    )


def check_objective(state: State, objective: str | list[str] | None) -> None:
    """Check that a run will have the metrics of its objective.

    Every evaluator has a 'loss', and every run a 'time'. None means the first metric of the first evaluator.
    """
    metrics = {part.label: [*state.eval_metrics.get(part.label, {}), "loss"] for part in state.evaluators}
    metrics["train"] = [*state.train_metrics]
    names = [f"{label}/{name}" for label, listed in metrics.items() for name in listed] + [TIME]
    for metric in objectives_of(objective):
        if not metrics_named(metric, names):
            raise WrongKey("objective", "this run has no such metric; " + nearest(metric, names), repr(metric))


def identify(config: Mapping[str, Any]) -> str:
    """Return a short hash of the parts of a resolved config that affect training: equal hashes mean equal results."""
    parts = {key: value for key, value in unmeasured(config).items() if key != "run_name"}
    return fingerprint(hidden_everywhere(parts))


def identity_in(folder: Path) -> str | None:
    """Return the identity of the run in a folder from its result, else its config; None if neither can be read."""
    if (result := read_result(folder)) is not None:
        return result.identity
    try:
        return identify(Record(folder).config)
    except (OSError, ValueError, AttributeError):
        return None


def fingerprint(value: Any) -> str:
    """Return a short hash of plain values, regardless of the order of keys."""
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


@contextmanager
def recording(job: Job) -> Iterator[Result]:
    """Write a job's result to its folder: RUNNING on entry, and how the job ended on exit. All ranks.

    After a WrongConfig, the previous result is restored.
    """
    folder = Path(job.run_dir)
    before = read_result(folder)
    result = Result("RUNNING", job.run_name, identify(job.experiment.plain), job.overrides, choices=job.choices)
    result.evaluation = before.evaluation if before is not None else {}  # of earlier sessions, until it is measured
    result.parent = job.tags.get(PARENT, before.parent if before is not None else "")
    result.forked_at = int(job.tags.get(FORKED_AT, before.forked_at if before is not None else 0))
    with kept(result, folder):
        yield result


@contextmanager
def kept(result: Result, folder: Path) -> Iterator[None]:
    """Write a result to a run's folder on entry, as RUNNING, and on exit, with how the run ended. All ranks."""
    before = read_result(folder)
    meter = LoadMeter() if is_rank_zero() else None
    earlier_seconds = result.seconds = before.seconds if before is not None else 0.0
    result.started = before.started if before is not None and before.started else time.time()
    result.reported = before.reported if before is not None else []
    is_written = _write(result, folder)
    try:
        yield
        result.status = "FINISHED"
    except WrongConfig:
        if is_written:
            _put_back(before, folder)
        raise
    except SessionOver as over:
        result.status = over.status
        raise
    except (KeyboardInterrupt, SystemExit):
        result.status = "KILLED"
        raise
    except BaseException as error:
        if message := facts_of(error).divergence:
            result.diverge(message)
        else:
            result.fail(error)
        raise
    finally:
        if result.status != "RUNNING":
            if meter is not None:
                result.load = meter.read(before.load if before is not None else {}, earlier_seconds)
            _write(result, folder, warns=is_written)  # at the first failure only
            set_fields(result=result.as_json() | {"folder": str(folder)})


@contextmanager
def diverging() -> Iterator[None]:
    """Raise `Diverged` in place of an error by which a callback or an algorithm reports divergence."""
    try:
        yield
    except Exception as error:
        if message := facts_of(error).divergence:
            raise Diverged(message) from error
        raise


@contextmanager
def timing(result: Result, error_context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `error_context`, and add the time spent in the `with` block to the seconds of a result."""
    began = time.perf_counter()
    try:
        with error_context():
            yield
    finally:
        result.seconds += time.perf_counter() - began


def _write(result: Result, folder: Path, warns: bool = True) -> bool:
    """Write a result, and return whether that was possible. Any rank; rank 0 writes."""
    if is_rank_zero():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            result.write(folder)
        except OSError as error:
            if warns:
                effect = "A sweep will not know the result of this run"
                log.warning("%s was not written: %s. %s", folder / RESULT, error, effect)
            return False
    return True


def _put_back(before: Result | None, folder: Path) -> None:
    if before is not None:
        _write(before, folder)
    elif is_rank_zero():
        (folder / RESULT).unlink(missing_ok=True)
