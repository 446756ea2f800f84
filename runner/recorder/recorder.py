"""`Recorder`: records your own training loop as a run, with two lines and one call per batch."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from runner.checkpoints.digest import DIGESTS, append_digests, truncate_digests
from runner.core.destination import LoggerDestination
from runner.core.logger import Logger
from runner.distributed.ranks import get_global_rank
from runner.failures.checks import check_whole, refuse_if
from runner.failures.errors import Diverged, wrong_argument
from runner.files.addresses import hidden_everywhere
from runner.files.names import RESULT
from runner.files.values import LocalPath
from runner.recorder.loop_state import LoopState
from runner.records.folder import check_unused, make_run_folder, owned
from runner.records.listing import OUTPUTS
from runner.records.record import FROM_BATCH, FROM_CHECKPOINT, OWN_LOOP, RUN_NAME, VERB, Record
from runner.records.recording import fingerprint, kept
from runner.records.result import Result, read_result
from runner.records.write import write_record
from runner.terminal.commands import show_typed, typed_command
from runner.terminal.console import show_path
from runner.terminal.text import print_to_stderr
from runner.training.metric_choice import metrics_named
from runner.training.metric_direction import sounds_like_loss

log = logging.getLogger("runner")

INTERVAL = 0.25  # seconds after which a fast loop passes its losses to the logger
_made = 0  # recorders that this process has made


class Recorder:
    """Records a training loop that is not the Trainer's, so that its runs are listed, compared and judged like others.

        recorder = Recorder({"seed": 0, "lr": 0.1})
        for inputs, targets in loader:
            ...
            recorder.batch(loss)
        recorder.log({"eval/accuracy": accuracy})

    Rank 0 makes a folder in `outputs/` with the config, the command, versions, uncommitted code, and the result. Values
    go to MLflow through a separate process, like those of a run: the loop waits neither for the device nor for MLflow.
    Other ranks write nothing. `runner runs`, `compare`, `verdict` and `table` take the folder. Runs are paired by the
    config's `seed`.

    The run ends with `close`, with the `with` block, or with the program. It is FAILED if an exception ended it, KILLED
    after Ctrl-C or `sys.exit` in a `with` block, DIVERGED if the last loss or the objective is NaN or infinite, and
    otherwise FINISHED. Without a `with` block, `sys.exit` looks like the normal end of the program. If the process is
    killed, its run is listed as cut off.

    Args:
        config: settings that define the run, by name: numbers, strings, lists, mappings. Other values become strings.
        name: name of the run; empty means the name of its folder.
        folder: the run's folder; None makes `outputs/<date>/<time>`. A run that is already there is continued.
        after_batch: number of batches already trained, if the loop continues from its own checkpoint; needs `folder`.
            Records of later batches are replaced.
        objective: the metric by which runs are compared; empty means the first metric that is logged.
        destinations: where values go besides the folder; None means `MLflowLogger()`.

    Attributes:
        folder: the run's folder on rank 0; None on other ranks.

    Raises:
        ValueError: `folder` holds something else; or it holds a run with another config, and `after_batch` is 0; or it
            holds no run, and `after_batch` is not 0.
        WrongConfig: another process records to `folder`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        folder: LocalPath | Path | None = None,
        after_batch: int = 0,
        objective: str = "",
        destinations: Sequence[LoggerDestination] | None = None,
    ) -> None:
        allowed = "must be a mapping from names to values, such as vars(args) or asdict(config)"
        if config is not None and not isinstance(config, Mapping):
            raise wrong_argument("config", config, allowed, TypeError)
        check_whole("after_batch", after_batch, 0, "a number of batches")
        reason = "must be 0 for a new run; give the folder of the run to continue"
        refuse_if(after_batch > 0 and folder is None, "after_batch", after_batch, reason)
        self.folder: Path | None = None
        self._state = LoopState(config=to_plain(config or {}), after_batch=after_batch)
        self._objective = objective
        self._metrics: dict[str, Tensor | float] = {}
        self._losses: list[Tensor | float] = []  # of the latest batches, not yet passed to the logger
        self._last_loss: Tensor | float = 0.0
        self._due = 0.0  # when to pass the losses to the logger
        self._is_open = True
        self._has_ended = False
        self._process = os.getpid()
        self._error_before = _last_error()
        self._destinations: tuple[LoggerDestination, ...] = ()
        self._result = Result("RUNNING", name, fingerprint(hidden_everywhere(self._state.config)), [])
        with ExitStack() as stack:  # an error below records that the run failed, and unlocks its folder
            if get_global_rank() == 0:
                chosen = [resolve_name("runner.callbacks:MLflowLogger")()] if destinations is None else destinations
                self._destinations = tuple(chosen)
                self.folder = self._open(folder, name, stack)
            self._logger = Logger(self._state, self._destinations)  # type: ignore[arg-type]
            self._began = time.perf_counter()
            if self.folder is not None:
                self._begin(self.folder)
            self._exit = stack.pop_all()

    def batch(self, loss: Tensor | float, batch: Any = None, **metrics: Tensor | float) -> None:
        """Record a trained batch, without reading anything from the device, except for digests.

        Call it after the optimizer's step, but before the schedule's step and before gradients are cleared, so that
        digests hold the gradients and learning rates of this batch.

        Args:
            loss: the loss of the batch; rank 0's is recorded.
            batch: the batch itself, to write its digest; see `watch`.
            metrics: further values of this batch, such as the learning rate, by key.

        Raises:
            ValueError: `loss` has several elements.
            RuntimeError: the recorder is closed.
        """
        if isinstance(loss, Tensor):
            # A loss on a device is read later. It is copied, because a CUDA graph writes each loss to the same memory.
            try:
                self._losses.append(loss.item() if loss.is_cpu else loss.detach().reshape(()).clone())
            except RuntimeError:
                reason = "a tensor of this shape; give one number, its mean"
                refuse_if(loss.numel() != 1, "loss", tuple(loss.shape), reason)
                raise
        else:
            self._losses.append(float(loss))
        if metrics or time.perf_counter() > self._due:
            self._pass_on()
            if metrics:
                self._logger.log_metrics(metrics)
            interval = self._state.digest_interval
            if interval and self._state.timestamp.batch % interval == 0:
                self._write_digests(loss, batch)

    def log(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Log results at the current batch, such as `{"eval/accuracy": 0.9, "eval/loss": 0.3}`.

        The run's result holds the last value of each. Values are not averaged over ranks.

        Raises:
            ValueError: a name is not `label/metric`, or a tensor has several elements.
        """
        self._pass_on()
        for name in metrics:
            if not all(name.partition("/")):
                raise wrong_argument("name", name, "must be label/metric, such as eval/accuracy")
        self._logger.log_metrics({_key_of(name): value for name, value in metrics.items()})
        for name, value in metrics.items():
            self._metrics[name] = value.detach().clone() if isinstance(value, Tensor) else float(value)

    def watch(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        interval: int = 1,
    ) -> None:
        """Write digests of gradients, weights, optimizer, generators, loss and batch to `digests.jsonl`.

        `runner compare` then names the first batch and tensors that differ between two loops, or between a loop and a
        run with `+callbacks=state_digest callbacks.state_digest.tensors=true`. Each digest copies all of these to the
        host.

        Args:
            model: the model that is trained; if it is sharded, call this method and `batch` on all ranks.
            optimizer: its optimizer.
            scheduler: its learning rate schedule, if its `state_dict` includes its position.
            scaler: the scaler of fp16 training.
            interval: batches between two digests.
        """
        check_whole("interval", interval, 1, "a number of batches")
        self._due = 0.0
        self._state.watch(model, optimizer, scheduler, scaler, interval)

    def close(self, error: BaseException | None = None) -> None:
        """End the run, with the error that stopped it, if any, and wait until MLflow has its values."""
        if not self._is_open or os.getpid() != self._process:
            return
        self._is_open = False
        atexit.unregister(self._close_at_exit)
        try:
            self._pass_on()
            if self.folder is not None and (self.folder / DIGESTS).exists():
                self._logger.log_artifact(self.folder / DIGESTS)
            self._measure()
        except Exception as failure:
            error = error or failure
            raise
        finally:
            self._end(error or self._divergence())

    def _end(self, error: BaseException | None) -> None:
        """Close the destinations, and write how the run ended."""
        self._state.error = error
        try:
            self._logger.close()
            for destination in self._destinations:
                destination.close(self._state, self._logger)  # type: ignore[arg-type]
        finally:
            self._exit.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
            self._has_ended = True
            self._due = 0.0  # so that a later batch is refused at once
        for destination in self._destinations:
            destination.post_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _open(self, typed: str | Path | None, name: str, stack: ExitStack) -> Path:
        """Make or check the folder, lock it, and write the record and the result into it. Rank 0."""
        global _made
        _made += 1
        folder = Path(make_run_folder(OUTPUTS, f"/recorder/{_made}") if typed is None else typed).absolute()
        _check_folder(folder, self._result.identity, self._state.timestamp.batch)
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(owned(folder))
        state = self._state
        state.run_dir = folder
        state.run_name = self._result.name = name or folder.name
        origin = {
            VERB: OWN_LOOP,
            "command": show_typed(hidden_everywhere(typed_command())),
            RUN_NAME: state.run_name,
            FROM_CHECKPOINT: None,
            FROM_BATCH: state.timestamp.batch,
        }
        program = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
        script = None if program is None else Path(program).absolute()
        self._files = write_record(folder, state.config, [], origin, script=script)
        if (folder / DIGESTS).exists():
            truncate_digests(folder / DIGESTS, state.timestamp.batch)
        stack.enter_context(kept(self._result, folder))
        return folder

    def _begin(self, folder: Path) -> None:
        """Open the destinations, and have the run closed when the program ends, if not before. Rank 0."""
        for destination in self._destinations:
            destination.warm_up()
            destination.init(self._state, self._logger)  # type: ignore[arg-type]
            destination.after_load(self._state, self._logger)  # type: ignore[arg-type]
        for path in self._files:
            self._logger.log_artifact(path, str("record" / path.parent.relative_to(folder)))
        # This starts the logger's thread, which registers an exit handler that must run after the one below.
        self._logger.log_uncopied({})
        atexit.register(self._close_at_exit)
        print_to_stderr(f"INFO: recorded in {show_path(folder)}")

    def _pass_on(self) -> None:
        """Pass the losses of the latest batches to the logger, many at once to save time."""
        if self._has_ended:
            raise RuntimeError(
                "the recorder is closed; make a new one, with folder and after_batch to continue the run"
            )
        losses, self._losses = self._losses, []
        for loss in losses:
            self._state.timestamp = self._state.timestamp.to_next_batch()
            self._logger.log_uncopied({"loss/train/total": loss})
            self._last_loss = loss
        if not self._state.digest_interval:  # otherwise each batch is passed on, since it may be time for digests
            self._due = time.perf_counter() + INTERVAL

    def _write_digests(self, loss: Tensor | float, batch: Any) -> None:
        """Write a line of digests; if that fails, warn, and write no more."""
        entry = self._state.digests(loss, batch)  # all ranks gather what is sharded
        if self.folder is None:
            return
        try:
            append_digests(self.folder / DIGESTS, entry)
        except OSError as error:
            log.warning("digests cannot be written to %s (%s): the loop continues without them", self.folder, error)
            self._state.digest_interval = 0

    def _measure(self) -> None:
        """Fill in the result: last metrics, objective, batches and seconds. Waits for the device."""
        result = self._result
        result.metrics |= {name: float(value) for name, value in self._metrics.items()}
        result.lower = sorted(name for name in result.metrics if sounds_like_loss(name.partition("/")[2]))
        result.batches = self._state.timestamp.batch
        result.seconds += time.perf_counter() - self._began
        for name in metrics_named(self._objective, result.metrics) if self._objective else [*result.metrics][:1]:
            result.objective_name = name
            result.objective = result.metrics[name]
            result.objectives = {name: result.metrics[name]}
            result.lower_is_better = name in result.lower

    def _divergence(self) -> Diverged | None:
        """Return an error if the last loss or the objective is not finite."""
        for name, value in {"the loss of the last batch": float(self._last_loss), **self._result.objectives}.items():
            if not math.isfinite(value):
                return Diverged(f"the run has diverged: {name} is {value}")
        return None

    def _close_at_exit(self) -> None:
        error = _last_error()
        self.close(None if error is self._error_before else error)


def to_plain(value: Any) -> Any:
    """Return a value as nested dicts and lists of numbers and strings; anything else becomes a string."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_plain(item) for item in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def _check_folder(folder: Path, identity: str, after_batch: int) -> None:
    """Check that a folder is unused, or holds a recorded loop that can be continued."""
    shown = str(folder)
    before = read_result(folder)
    if before is None:
        refuse_if(after_batch > 0, "folder", shown, f"holds no run to continue after batch {after_batch}")
        names = [path.name for path in folder.glob("*") if not path.name.startswith(".")]
        if (folder / RESULT).exists() or names:
            check_unused(folder)
        return
    verb = Record(folder).verb
    reason = f"holds a run of `runner {verb}`; choose a new folder"
    refuse_if(verb != OWN_LOOP, "folder", shown, reason)
    reason = "holds a run with another config; choose a new folder, or give after_batch to continue it"
    refuse_if(before.identity != identity and after_batch == 0, "folder", shown, reason)


def _key_of(name: str) -> str:
    """Return the key under which a run logs a metric: `loss/eval/total` for `eval/loss`."""
    label, _, metric = name.partition("/")
    return f"loss/{label}/total" if metric == "loss" else f"metrics/{name}"


def _last_error() -> BaseException | None:
    """Return the last uncaught exception, such as the one that ended the program."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
