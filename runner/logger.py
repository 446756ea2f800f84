"""The way of a value from training to its destinations, off the per-batch path."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.destination import LoggerDestination, Record
from runner.failures import add_raiser

if TYPE_CHECKING:
    from runner.state import State

log = logging.getLogger("runner")

Number = bool | int | float


class Logger:
    """Fans out what is logged to destinations.

    `log_metrics` keeps references and returns at once; a background thread reads values back from the device in
    one transfer per batch of records and hands them on. It never waits for a device or a disk.

    Args:
        state: gives the step and the timestamp.
        destinations: those that work on this rank.
        interval: seconds between two read-backs.
    """

    def __init__(self, state: State, destinations: Sequence[LoggerDestination] = (), interval: float = 0.25) -> None:
        self.destinations = tuple(destinations)
        self._state = state
        self._interval = interval
        self._pending: deque[Record] = deque()
        self._draining = threading.RLock()
        self._delivering = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._warned: set[int] = set()

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Log parameters of the run: a nested mapping of plain values."""
        self._give(lambda one: one.log_hyperparameters(hyperparameters))

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Log names under which the run is found again."""
        self._give(lambda one: one.log_tags(tags))

    def log_metrics(self, metrics: Mapping[str, Tensor | Number], step: int | None = None) -> None:
        """Log numbers or zero-dimensional tensors on any device, without a host-device sync.

        Args:
            metrics: values by key; a `/` groups keys in the MLflow UI. Tensors are copied, so they may change later.
            step: the batch to log at; default `state.timestamp.batch`.

        Raises:
            ValueError: a tensor has not exactly one element.
            TypeError: a value is no number, or they are no mapping.
        """
        if self.destinations:
            if not hasattr(metrics, "items"):
                raise TypeError(f"metrics={metrics!r}: must be a dict of numbers by key, such as {{'my/key': 0.5}}")
            kept = {key: value if type(value) is float else _keep(key, value) for key, value in metrics.items()}
            self.log_uncopied(kept, step)

    def log_uncopied(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log metrics without a copy: floats and zero-dimensional tensors that nobody changes any more.

        Args:
            metrics: by key; belongs to the logger from now on.
            step: the batch to log at; default `state.timestamp.batch`.
        """
        if not self.destinations:
            return
        if self._error is not None:
            self.flush()
        timestamp = self._state.timestamp
        self._pending.append(Record(metrics, timestamp.batch if step is None else step, timestamp, time.time()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="logger", daemon=True)
            self._thread.start()
            atexit.register(self._flush_late)

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int | None = None
    ) -> None:
        """Log a table of plain values; a later one of the same name replaces it."""
        at = self._state.timestamp.batch if step is None else step
        self._give(lambda one: one.log_table(columns, rows, name, at))

    def log_images(
        self, images: Any, name: str, step: int | None = None, captions: Sequence[str] | None = None
    ) -> None:
        """Log images: uint8 arrays of shape (N, H, W, C) with C 1 or 3, on the CPU."""
        at = self._state.timestamp.batch if step is None else step
        self._give(lambda one: one.log_images(images, name, at, captions))

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Log a file that is complete at `path`."""
        self._give(lambda one: one.log_artifact(Path(path), name))

    def flush(self) -> None:
        """Wait until everything logged so far has reached the destinations; from within one of them, return at once.

        Raises:
            Exception: what reading back or a destination raised in the background, unless that was a destination's
                OSError, which is only reported.
        """
        self._drain()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Stop the background thread; what is still pending is handed on first."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self._flush_late)
        self.flush()

    def _flush_late(self) -> None:
        log.warning("run %r was not closed: use `with Trainer(...)`, or call close()", self._state.run_name)
        self.flush()

    def _work(self) -> None:
        while not self._stop.wait(self._interval):
            self._drain()

    def _drain(self) -> None:
        with self._draining:
            if self._delivering:  # a destination that is being given records flushes: the rest comes after these
                return
            records = join([self._pending.popleft() for _ in range(len(self._pending))])
            if not records:
                return
            self._delivering = True
            try:
                read_back(records)
                self._give(lambda one: one.log_records(records))
            except Exception as error:
                self._error = self._error or error
            finally:
                self._delivering = False

    def _give(self, log_to: Callable[[LoggerDestination], None]) -> None:
        """Log to each destination, whatever another one raises; a disk that is full or gone is only reported."""
        raised: Exception | None = None
        for destination in self.destinations:
            try:
                log_to(destination)
            except OSError as error:
                if id(destination) not in self._warned:
                    self._warned.add(id(destination))
                    log.warning("%s cannot write (%s): training goes on without it", destination.config_key, error)
            except Exception as error:
                add_raiser(error, destination.config_key)
                error.add_note(f"raised by {destination.config_key!r}, to which this was logged")
                raised = raised or error
        if raised is not None:
            raise raised


def _keep(key: str, value: Tensor | Number) -> Tensor | float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"metric {key!r} has shape {tuple(value.shape)}; log one number, or one key per element")
        if value.is_complex():
            raise TypeError(f"metric {key!r} is complex; log its abs(), or its parts")
        return value.detach().reshape(()).clone()
    try:
        return value.__float__()  # which text has not, while float("1") is 1
    except (AttributeError, TypeError):
        allowed = "must be a number or a tensor of one; text goes into log_tags or log_table"
        raise TypeError(f"metric {key!r}={value!r}: {allowed}") from None


def join(records: Sequence[Record]) -> list[Record]:
    """Return records with those of one moment as one: a batch's metrics come from several callbacks.

    The first one's dict takes them in. A key that is there already stays in a record of its own.
    """
    joined: list[Record] = []
    metrics: dict[str, Any] = {}
    step, timestamp = -1, None
    for record in records:
        # Timestamps never change: the same object is the same moment.
        if record.timestamp is timestamp and record.step == step and metrics.keys().isdisjoint(record.metrics):
            metrics.update(record.metrics)
        else:
            metrics, step, timestamp, _ = record
            joined.append(record)
    return joined


def read_back(records: Sequence[Record]) -> None:
    """Replace tensors in records by floats, in place, with one sync per device other than the host's, and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str]]] = {}
    for metrics in (record.metrics for record in records):
        for key, tensor in [(key, value) for key, value in metrics.items() if type(value) is not float]:
            if tensor.is_cpu:
                metrics[key] = float(tensor.item())
            else:
                groups.setdefault((tensor.device, tensor.dtype), []).append((metrics, key))
    for places in groups.values():
        # The intended host-device sync: on the logger's own thread.
        values = torch.stack([metrics[key] for metrics, key in places])
        for (metrics, key), value in zip(places, values.tolist(), strict=True):
            metrics[key] = float(value)
