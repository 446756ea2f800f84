"""The result of a run: `result.json` in its folder, which sweeps use to skip, resume and compare jobs."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from runner.addresses import hidden_everywhere
from runner.config.composed import OF_THE_COMMAND
from runner.config.errors import WrongConfig
from runner.config.signatures import nearest
from runner.distributed.environment import is_rank_zero
from runner.distributed.job import Job
from runner.files.whole import write_whole

if TYPE_CHECKING:
    from runner.state import State

log = logging.getLogger("runner")

FILE = "result.json"
# Keys that do not affect training.
_NO_PART = (*OF_THE_COMMAND, "run_name")


@dataclass
class Result:
    """The result of a run so far.

    Attributes:
        status: RUNNING, FINISHED, DIVERGED, FAILED, KILLED (by a signal), or REFUSED (by a sweep, because of its
            config; such a job has no folder). A run that was cut off stays RUNNING.
        name: name of the run.
        identity: hash of the config that was trained, see `identify`.
        overrides: overrides of the job.
        objective: the value that runs are compared by; None if it was not computed.
        objective_name: the metric behind it, such as 'eval/MulticlassAccuracy'; empty until it is known.
        lower_is_better: whether a smaller objective is better.
        metrics: last values by label and name.
        tested: checkpoint whose weights were tested after training, or 'last'; None if there was no test.
        seconds: training time in all sessions that ended.
        error: stack trace of the failure, or the reason for a refusal.
        wrong_key: key of the config with which the error of a REFUSED job begins; empty if it begins otherwise.
        pid: the process that trains the run, or last did.
        host: the machine that trains the run, or last did.
    """

    status: str
    name: str
    identity: str
    overrides: list[str]
    objective: float | None = None
    objective_name: str = ""
    lower_is_better: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    tested: str | None = None
    seconds: float = 0.0
    error: str | None = None
    wrong_key: str = ""
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)

    def measure(self, state: State, objective: str | None) -> None:
        """Fill in the last metrics of a run and its objective. All ranks.

        Args:
            state: the state of its Trainer.
            objective: name of the metric to compare by; see `check_objective`.
        """
        from runner.metrics import lower_is_better, scalars

        for label, values in state.metric_values.items():
            for name, value in values.items():
                self.metrics |= {key: float(one) for key, one in scalars(f"{label}/{name}", value).items()}
        evaluated = [key for key in self.metrics if not key.startswith("train/")]
        chosen = [key for key in self.metrics if objective in (key, key.partition("/")[2])] if objective else evaluated
        if chosen:
            label, _, name = chosen[0].partition("/")
            self.objective = self.metrics[chosen[0]]
            self.objective_name = chosen[0]
            self.lower_is_better = lower_is_better(name, state.eval_metrics.get(label, state.train_metrics).get(name))

    def write(self, folder: Path) -> None:
        """Write the result into a folder, replacing an earlier one; NaN and infinities are written as text.

        If no new file can be made, for example because no inode is free, the existing file is overwritten in place.

        Raises:
            OSError: the file cannot be written.
        """
        content = hidden_everywhere(asdict(self))
        content["objective"] = _to_json(self.objective)
        content["metrics"] = {name: _to_json(value) for name, value in self.metrics.items()}
        text = json.dumps(content, indent=1)
        try:
            write_whole(folder / FILE, text)
        except OSError:  # no new file can be made, for example without a free inode
            if not (folder / FILE).exists():
                raise
            _write_over(folder / FILE, text.encode())


def _write_over(path: Path, content: bytes) -> None:
    """Overwrite a file's content in place; the file stays as it was if the disk has no room.

    Raises:
        OSError: the disk has no room.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, len(content))
        file.write(content)
        file.truncate()


class Diverged(Exception):
    """A run was trained to the end, but its loss or objective is NaN or infinite."""


def check_converged(state: State, result: Result) -> None:
    """Raise if a finished run has diverged. All ranks; they raise together.

    Args:
        state: the state of its Trainer.
        result: its result, measured.

    Raises:
        Diverged: the last loss on any rank, or the objective, is not finite.
    """
    from runner.distributed.collectives import any_rank

    loss = float(getattr(state, "total_loss", 0.0))  # a run that was already complete trains no batch
    wrong = f"the loss of the last batch is {loss}"
    if not any_rank(not math.isfinite(loss)):
        if result.objective is None or math.isfinite(result.objective):
            return
        wrong = f"objective {result.objective_name} is {result.objective}"
    elif math.isfinite(loss):
        wrong = "the loss of the last batch is not finite on another rank"
    raise Diverged(
        f"the run has diverged: {wrong}. Lower the learning rate, warm it up, or clip gradients "
        "(+algorithms=gradient_clipping); allow_divergence=true lets such a run end well"
    )


def read_result(folder: Path) -> Result | None:
    """Return the result of the run in a folder; None if there is none that can be read."""
    try:
        content = json.loads((folder / FILE).read_text())
        content["objective"] = None if content["objective"] is None else float(content["objective"])
        content["metrics"] = {name: float(value) for name, value in content["metrics"].items()}
        return Result(**content)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def is_unfinished(folder: Path) -> bool:
    """Return whether the run in a folder has started but not finished."""
    result = read_result(folder)
    return result is not None and result.status != "FINISHED"


def check_objective(state: State, objective: str | None) -> None:
    """Check that a run will have the metric that it is to be compared by.

    Args:
        state: the state of its Trainer.
        objective: 'MulticlassAccuracy', or with its label 'eval/MulticlassAccuracy'; every evaluator has a 'loss'. None
            stands for the first metric of the first evaluator.

    Raises:
        ValueError: the run has no such metric; the message lists those that it has.
    """
    metrics = {one.label: [*state.eval_metrics.get(one.label, {}), "loss"] for one in state.evaluators}
    metrics["train"] = [*state.train_metrics]
    names = [f"{label}/{name}" for label, listed in metrics.items() for name in listed]
    if objective is not None and not any(one == objective or one.partition("/")[2] == objective for one in names):
        raise ValueError(f"objective={objective!r}: this run has no such metric; {nearest(objective, names)}")


def identify(config: Mapping[str, Any]) -> str:
    """Return a short hash of the parts of a resolved config that affect training: equal hashes mean equal results."""
    parts = {key: value for key, value in config.items() if key not in _NO_PART}
    return fingerprint(hidden_everywhere(parts))


def identity_in(folder: Path) -> str | None:
    """Return the identity of the run in a folder, from its result, or from its config if the result is unreadable."""
    if (found := read_result(folder)) is not None:
        return found.identity
    try:
        return identify(yaml.safe_load((folder / "config.yaml").read_bytes()))
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
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
    started = time.monotonic()
    before = read_result(folder)
    result = Result("RUNNING", job.run_name, identify(job.config), job.overrides)
    _write(result, folder)
    try:
        yield result
        result.status = "FINISHED"
    except WrongConfig:
        _put_back(before, folder)
        raise
    except Diverged as error:
        result.status = "DIVERGED"
        result.error = str(error)
        raise
    except (KeyboardInterrupt, SystemExit):
        result.status = "KILLED"
        raise
    except BaseException as error:
        result.status = "FAILED"
        result.error = "".join(traceback.format_exception(error))
        raise
    finally:
        if result.status != "RUNNING":
            result.seconds = time.monotonic() - started + (before.seconds if before is not None else 0.0)
            _write(result, folder)


def _write(result: Result, folder: Path) -> None:
    if is_rank_zero():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            result.write(folder)
        except OSError as error:
            log.warning("%s was not written: %s. A sweep will not know the result of this run", folder / FILE, error)


def _put_back(before: Result | None, folder: Path) -> None:
    if before is not None:
        _write(before, folder)
    elif is_rank_zero():
        (folder / FILE).unlink(missing_ok=True)


def _to_json(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
