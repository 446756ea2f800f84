"""What came of a run: `result.json` in its folder, by which sweeps skip, resume and compare."""

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
# What changes nothing of what is trained.
_NO_PART = (*OF_THE_COMMAND, "run_name")


@dataclass
class Result:
    """What came of a run so far.

    Attributes:
        status: RUNNING, FINISHED, DIVERGED, FAILED, KILLED (by a signal), or REFUSED (by a sweep, for its config; such
            a job has no folder). One that was cut off without a word stays RUNNING.
        name: of the run.
        identity: of the config that was trained: see `identify`.
        overrides: as the job was given them.
        objective: what runs are compared by; None where it was not computed.
        objective_name: the metric that it is, 'eval/MulticlassAccuracy'; empty before it is known.
        lower_is_better: whether a smaller objective is the better one.
        metrics: last values by label and name.
        seconds: in all sessions that ended.
        error: trace of what it failed with.
        wrong_key: key of the config with which the error of a REFUSED job begins; empty where it begins otherwise.
        pid: process that trains it, or did.
        host: machine that trains it, or did.
    """

    status: str
    name: str
    identity: str
    overrides: list[str]
    objective: float | None = None
    objective_name: str = ""
    lower_is_better: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    wrong_key: str = ""
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)

    def measure(self, state: State, objective: str | None) -> None:
        """Take the last metrics of a run, and what it is compared by. All ranks.

        Args:
            state: of its Trainer.
            objective: the metric's name; see `check_objective`.
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
        """Write it into a folder, replacing what is there at once; NaN and infinities are written as text.

        Where no file can be made, as without a free inode, it is written over what is there.

        Raises:
            OSError: it cannot be written.
        """
        content = hidden_everywhere(asdict(self))
        content["objective"] = _to_json(self.objective)
        content["metrics"] = {name: _to_json(value) for name, value in self.metrics.items()}
        text = json.dumps(content, indent=1)
        try:
            write_whole(folder / FILE, text)
        except OSError:  # no room for another file, as where there is no inode left
            if not (folder / FILE).exists():
                raise
            _write_over(folder / FILE, text.encode())


def _write_over(path: Path, content: bytes) -> None:
    """Replace a file's content in its place; it stays as it was where there is no room.

    Raises:
        OSError: there is none.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, len(content))
        file.write(content)
        file.truncate()


class Diverged(Exception):
    """A run was trained to its end, and what came of it is NaN or infinite."""


def check_converged(state: State, result: Result) -> None:
    """Raise where a run that has been measured has diverged. All ranks alike.

    Args:
        state: of its Trainer.
        result: what came of it.

    Raises:
        Diverged: its last loss, on any rank, or its objective is not finite.
    """
    from runner.distributed.collectives import any_rank

    loss = float(getattr(state, "total_loss", 0.0))  # a run that had ended before trains nothing
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
    """Return what came of the run in a folder; None where nothing is said of it that can be read."""
    try:
        content = json.loads((folder / FILE).read_text())
        content["objective"] = None if content["objective"] is None else float(content["objective"])
        content["metrics"] = {name: float(value) for name, value in content["metrics"].items()}
        return Result(**content)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def is_unfinished(folder: Path) -> bool:
    """Whether the run in a folder has begun, and did not say that it finished."""
    result = read_result(folder)
    return result is not None and result.status != "FINISHED"


def check_objective(state: State, objective: str | None) -> None:
    """Raise where a run will not have the metric that it is to be compared by.

    Args:
        state: of its Trainer.
        objective: 'MulticlassAccuracy', or with its label, 'eval/MulticlassAccuracy'; every evaluator has a 'loss'.
            None: the first metric of the first evaluator.

    Raises:
        ValueError: there is no such metric; those that there are get listed.
    """
    metrics = {one.label: [*state.eval_metrics.get(one.label, {}), "loss"] for one in state.evaluators}
    metrics["train"] = [*state.train_metrics]
    names = [f"{label}/{name}" for label, listed in metrics.items() for name in listed]
    if objective is not None and not any(one == objective or one.partition("/")[2] == objective for one in names):
        raise ValueError(f"objective={objective!r}: is no metric of this run; {nearest(objective, names)}")


def identify(config: Mapping[str, Any]) -> str:
    """Return a short hash of what a resolved config trains: two runs of one identity give the same result."""
    parts = {key: value for key, value in config.items() if key not in _NO_PART}
    return fingerprint(hidden_everywhere(parts))


def identity_in(folder: Path) -> str | None:
    """Return the identity of the run in a folder: its result has it, or where that was torn, its config."""
    if (found := read_result(folder)) is not None:
        return found.identity
    try:
        return identify(yaml.safe_load((folder / "config.yaml").read_bytes()))
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None


def fingerprint(value: Any) -> str:
    """Return a short hash of plain values; the order of keys plays no part."""
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


@contextmanager
def recording(job: Job) -> Iterator[Result]:
    """Inside, what comes of a job is filled in; its folder says RUNNING until the end, then how it ended. All ranks.

    A WrongConfig leaves what was said before.
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
            log.warning("%s was not written: %s. A sweep cannot tell what came of this run", folder / FILE, error)


def _put_back(before: Result | None, folder: Path) -> None:
    if before is not None:
        _write(before, folder)
    elif is_rank_zero():
        (folder / FILE).unlink(missing_ok=True)


def _to_json(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
