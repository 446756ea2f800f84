"""The result of a run, `result.json` in its folder; runs are listed, compared, skipped and resumed by it."""

from __future__ import annotations

import json
import math
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from runner.failures.errors import RankFailed
from runner.failures.exit_codes import DIVERGED, code_of_failure
from runner.failures.facts import facts_of
from runner.files.addresses import hidden_everywhere
from runner.files.names import RESULT
from runner.files.whole import read_bounded, write_atomically
from runner.terminal.answer import SCHEMA, error_object, plain
from runner.training.metric_choice import metrics_named

if TYPE_CHECKING:
    from runner.core.state import State

SEED = "seed"
FOLD = "folds.held_out"
"""Keys in which repeated runs of one setting differ."""
TIME = "time"
"""The name of the objective that counts the seconds of training, without evaluations."""
Objective = float | list[float] | None
"""The return value of a job of a sweep: its objective, all of them if there are several, or None."""
LARGEST = 4_000_000  # bytes; larger results are not read, and ours have a few thousand


@dataclass
class Result:
    """The result of a run so far.

    Attributes:
        status: RUNNING, FINISHED, DIVERGED, FAILED, KILLED (by a signal), PAUSED (at the end of a session), QUEUED (as
            a Slurm job that will be resumed), PRUNED (a sweep's pruner found it not worth training further), or
            REFUSED (by a sweep, because of its config; such a job has no folder). An interrupted run stays RUNNING.
        name: name of the run.
        identity: hash of the config that was trained, see `identify`.
        overrides: overrides of the job.
        choices: the chosen name of each config group.
        evaluation: digests of the data and metrics of evaluators, see `runner.records.evaluation`; runs can be
            compared only if these are equal.
        lower: names of the metrics for which a smaller value is better.
        objective: the first value that runs are compared by; None if it was not computed.
        objective_name: the metric behind it, such as 'eval/MulticlassAccuracy'; empty until it is known.
        objectives: all objectives by their metrics, in the order asked for.
        reported: the objectives reported to a sampler when the run was pruned. If the run is revived, they are reported
            again, so that a seeded search repeats exactly. Empty if the run was never pruned.
        lower_is_better: whether a smaller objective is better.
        metrics: last values by label and name.
        tested: checkpoint whose weights were tested after training, or 'last'; None if there was no test.
        parent: folder of the run that this one was forked from; empty if it started from scratch.
        forked_at: the batch of the parent after which it began.
        base: digests of the frozen weights that checkpoints leave out; empty without any.
        adapter: digest of the weights that were trained on this base, as evaluations use them; empty without a base.
        class_weights: weights of the classes in the loss, including those that `balanced` stood for; empty without any.
        batches: batches trained when training ended normally; 0 until then.
        seconds: time of `fit` and tests in all sessions that ended, excluding the time to build objects before and to
            wait for MLflow after; for other verbs, the time of evaluations or predictions.
        load: how busy the machine was meanwhile, see `runner.records.load.LoadMeter`; empty until the run ends.
        started: when training began, in seconds since 1970; 0 until it does.
        error: the error in its JSON form, see `runner.terminal.answer.error_object`; None without one.
        trace: stack trace of the failure; empty without one.
        wrong_key: key of the config that the error of a REFUSED job begins with; empty if there is no such key.
        pid: the process that trains the run or trained it last.
        host: the machine that trains the run or trained it last.
    """

    status: str
    name: str
    identity: str
    overrides: list[str]
    objective: float | None = None
    objective_name: str = ""
    lower_is_better: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    objectives: dict[str, float] = field(default_factory=dict)
    reported: list[float] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    evaluation: dict[str, str] = field(default_factory=dict)
    lower: list[str] = field(default_factory=list)
    tested: str | None = None
    parent: str = ""
    forked_at: int = 0
    base: str = ""
    adapter: str = ""
    class_weights: list[float] = field(default_factory=list)
    batches: int = 0
    seconds: float = 0.0
    load: dict[str, float] = field(default_factory=dict)
    started: float = 0.0
    error: dict[str, Any] | None = None
    trace: str = ""
    wrong_key: str = ""
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)

    def measure(self, state: State, objective: str | list[str] | None) -> None:
        """Fill in the last metrics of a run and its objectives. All ranks."""
        from runner.checkpoints.base import digests_of
        from runner.core.engine import evaluation_weights
        from runner.distributed.environment import is_rank_zero
        from runner.records.evaluation import describe_evaluators

        self.take_metrics(state)
        weights = (state.config.get("model") or {}).get("class_weights")
        self.class_weights = [*map(float, weights)] if isinstance(weights, list) else []
        with evaluation_weights(state):
            self.base, self.adapter = digests_of(state.unwrapped_model)
        evaluated = [key for key in self.metrics if not key.startswith("train/")]
        if TIME in objectives_of(objective):
            self.metrics[TIME] = state.timestamp.total_wct
            self.lower = sorted({*self.lower, TIME})
        for requested in objectives_of(objective) or evaluated[:1]:
            if chosen := metrics_named(requested, self.metrics):
                self.objectives[chosen[0]] = self.metrics[chosen[0]]
        if self.objectives:
            self.objective_name, self.objective = next(iter(self.objectives.items()))
            self.lower_is_better = self.objective_name in self.lower
        if is_rank_zero():
            self.evaluation = describe_evaluators(state)

    def take_metrics(self, state: State) -> None:
        """Fill in the last metrics, and how many batches were trained. Any rank, also between two batches."""
        from runner.training.metrics import lower_is_better, scalars

        self.batches = state.timestamp.batch
        for label, values in state.metric_values.items():
            for name, value in values.items():
                measured = {key: float(number) for key, number in scalars(f"{label}/{name}", value).items()}
                self.metrics |= measured
                if lower_is_better(name, state.eval_metrics.get(label, state.train_metrics).get(name)):
                    self.lower = sorted({*self.lower, *measured})

    def evaluated_by(self, metric: str) -> dict[str, str | None]:
        """Return how a metric such as 'eval/loss' was measured; runs are comparable if these values are equal."""
        label, name, *_ = f"{metric}/".split("/")  # a third part names a class
        keys = {"data": f"{label}:data", "size": f"{label}:size", "metric's code": f"{label}/{name}"}
        return {name: self.evaluation.get(key) for name, key in keys.items()}

    @property
    def answer(self) -> Objective:
        """The value reported to the sampler of a sweep: the objective, or all if there are several; None if unknown."""
        values = self.reported or [*self.objectives.values()]
        return values if len(values) > 1 else next(iter(values), None)

    def fail(self, error: BaseException) -> None:
        """Record that the run failed, and why."""
        self.status = "FAILED"
        self.error = error_of_failure(error)
        self.trace = "".join(traceback.format_exception(error))

    def diverge(self, message: str) -> None:
        """Record that the run has diverged, and why."""
        self.status = "DIVERGED"
        self.error = error_object(DIVERGED, message)

    @property
    def message(self) -> str:
        """The error message, for people; empty if there was no error."""
        return str((self.error or {}).get("message", ""))

    def as_json(self) -> dict[str, Any]:
        """Return the content of `result.json`; `--json` prints the same as `result`."""
        return {"schema": SCHEMA, **plain(hidden_everywhere(asdict(self)))}

    def write(self, folder: Path) -> None:
        """Write the result into a folder, replacing an earlier one; NaN and infinities are written as text.

        If no new file can be made, for example without a free inode, an existing file is overwritten.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(self.as_json(), indent=1, allow_nan=False)
        try:
            write_atomically(folder / RESULT, text)
        except OSError:
            if not (folder / RESULT).exists():
                raise
            _write_over(folder / RESULT, text.encode())


_KINDS = get_type_hints(Result)


def error_of_failure(error: BaseException) -> dict[str, Any]:
    """Return the JSON form of a failure in training, with the key of the faulty hook."""
    is_of_other_rank = isinstance(error, RankFailed)
    facts = error.facts if is_of_other_rank else facts_of(error)
    first = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    message = str(error) if is_of_other_rank else first
    return error_object(code_of_failure(error), message, facts.key or facts.section or facts.raised_by)


def _write_over(path: Path, content: bytes) -> None:
    """Overwrite a file's content; the file stays as it was if the disk is full.

    Raises:
        OSError: the disk is full.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, len(content))
        file.write(content)
        file.truncate()


def read_result(folder: Path) -> Result | None:
    """Return the result of the run in a folder, perhaps another user's; None if it cannot be read."""
    try:
        content = json.loads(read_bounded(folder / RESULT, LARGEST))
        return Result(**{key: _reader(_KINDS[key])(value) for key, value in content.items() if key != "schema"})
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        return None


@lru_cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts a JSON value, in which some numbers are text, to the type of a field.

    That function raises TypeError, ValueError or AttributeError for a value of another type.
    """
    inner = [_reader(part) for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) is UnionType:
        return lambda value: None if value is None else inner[0](value)
    if get_origin(kind) is dict:
        return lambda value: {name: inner[1](part) for name, part in value.items()}
    if get_origin(kind) is list:
        return lambda value: [inner[0](part) for part in value]
    if kind is str:
        return _as_text
    return _unchanged if kind is Any else kind


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _unchanged(value: Any) -> Any:
    return value


def objectives_of(objective: str | list[str] | None) -> list[str]:
    """Return the names in the config's `objective`, if any."""
    return [objective] if isinstance(objective, str) else [*(objective or [])]


def is_unfinished(folder: Path) -> bool:
    """Return whether the run in a folder has started but not finished."""
    result = read_result(folder)
    return result is not None and result.status != "FINISHED"


def to_json(value: float | None) -> float | str | None:
    """Return a number in JSON's form: NaN and infinities are text."""
    return value if value is None or math.isfinite(value) else str(value)
