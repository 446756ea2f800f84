"""The logger: passes values from training to the logger destinations without delaying the training loop."""

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

from runner.core.destination import LoggerDestination, MetricRecord
from runner.core.logged import as_step, check_file, check_images, check_named, check_table
from runner.failures.errors import wrong_argument
from runner.failures.facts import add_raiser
from runner.libraries.typed import to_list

if TYPE_CHECKING:
    from runner.core.state import State

log = logging.getLogger("runner")

Number = bool | int | float


class Logger:
    """Passes everything that is logged to each destination.

    `log_metrics` queues values and returns at once, without waiting for a device or a disk. A background thread reads
    queued values back from the device, many in one transfer, and passes them on.

    Args:
        state: the state that supplies the step and the timestamp.
        destinations: the destinations that are active on this rank.
        interval: seconds between two read-backs.
    """

    def __init__(self, state: State, destinations: Sequence[LoggerDestination] = (), interval: float = 0.25) -> None:
        self.destinations = tuple(destinations)
        self._state = state
        self._interval = interval
        self._pending: deque[MetricRecord] = deque()
        self._drain_lock = threading.RLock()
        self._is_delivering = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._warned: set[int] = set()

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Log the run's hyperparameters: a nested mapping of plain values.

        Raises:
            TypeError: `hyperparameters` is not a mapping from names to values.
        """
        check_named("hyperparameters", hyperparameters)
        self._deliver(lambda destination: destination.log_hyperparameters(hyperparameters))

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Log tags by which the run can be found later.

        Raises:
            TypeError: `tags` is not a mapping from names to values.
        """
        check_named("tags", tags)
        self._deliver(lambda destination: destination.log_tags(tags))

    def log_metrics(self, metrics: Mapping[str, Tensor | Number], step: int | None = None) -> None:
        """Log numbers or zero-dimensional tensors on any device, without a host-device sync.

        Args:
            metrics: values by key; a `/` groups keys in the MLflow UI. Tensors are copied, so they may change later.
            step: the batch to log at, by default `state.timestamp.batch`.

        Raises:
            ValueError: a tensor does not have exactly one element.
            TypeError: a value is not a real number, or `metrics` is not a mapping.
        """
        if self.destinations:
            if not hasattr(metrics, "items"):
                raise wrong_argument("metrics", metrics, "must be a dict of numbers, such as {'key': 0.5}", TypeError)
            copies = {key: value if type(value) is float else _copy(key, value) for key, value in metrics.items()}
            self.log_uncopied(copies, step)

    def log_uncopied(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log floats and zero-dimensional tensors without copying them; the tensors must not change afterwards.

        Args:
            metrics: values by key; the logger takes ownership of the dict.
            step: the batch to log at, by default `state.timestamp.batch`.
        """
        if not self.destinations:
            return
        if self._error is not None:
            self.flush()
        timestamp = self._state.timestamp
        at = timestamp.batch if step is None else as_step(step)
        self._pending.append(MetricRecord(metrics, at, timestamp, time.time()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="logger", daemon=True)
            self._thread.start()
            atexit.register(self._flush_late)

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int | None = None
    ) -> None:
        """Log a table of plain values; a later table of the same name replaces it.

        Raises:
            ValueError: a row has more or fewer values than there are columns, or a value is an array.
        """
        columns, rows = check_table(columns, rows, name)
        at = self._state.timestamp.batch if step is None else as_step(step)
        self._deliver(lambda destination: destination.log_table(columns, rows, name, at))

    def log_images(
        self, images: Any, name: str, step: int | None = None, captions: Sequence[str] | None = None
    ) -> None:
        """Log images: uint8 of shape (N, H, W, C) with C 1 or 3, an array, or a tensor on the CPU.

        Args:
            images: at least one image; destinations get an array.
            name: the name under which the images are listed.
            step: the batch to log at, by default `state.timestamp.batch`.
            captions: one for each image.

        Raises:
            ValueError: the images have another dtype or shape, or there are more or fewer captions than images.
        """
        array = check_images(images, name, captions)
        at = self._state.timestamp.batch if step is None else as_step(step)
        self._deliver(lambda destination: destination.log_images(array, name, at, captions))

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Log the file at `path`, which must be complete; `name` is a folder in the destination.

        A rank without destinations does not even check that the file exists: rank 0 may still be writing it.

        Raises:
            ValueError: there is no such file, or `name` is not a folder inside the destination.
        """
        if self.destinations:
            file = check_file(path, name)
            self._deliver(lambda destination: destination.log_artifact(file, name))

    def flush(self) -> None:
        """Wait until everything logged so far has reached the destinations; if a destination calls it, return at once.

        Raises:
            Exception: the background thread failed to read values back, or a destination failed there. A destination's
                OSError is only a warning.
        """
        self._drain()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Stop the background thread, and deliver everything that is pending."""
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
        with self._drain_lock:
            if self._is_delivering:  # a destination called flush() while receiving records; newer ones have to wait
                return
            records = join([self._pending.popleft() for _ in range(len(self._pending))])
            if not records:
                return
            self._is_delivering = True
            try:
                read_back(records)
                self._deliver(lambda destination: destination.log_records(records))
            except Exception as error:
                self._error = self._error or error
            finally:
                self._is_delivering = False

    def _deliver(self, log_to: Callable[[LoggerDestination], None]) -> None:
        """Log to every destination, even if some fail; warn once about each destination that cannot write."""
        first_error: Exception | None = None
        for destination in self.destinations:
            try:
                log_to(destination)
            except OSError as error:
                if id(destination) not in self._warned:
                    self._warned.add(id(destination))
                    log.warning("%s cannot write (%s): training continues without it", destination.config_key, error)
            except Exception as error:
                add_raiser(error, destination.config_key)
                error.add_note(f"raised by {destination.config_key!r}, to which this was logged")
                first_error = first_error or error
        if first_error is not None:
            raise first_error


def _copy(key: str, value: Tensor | Number) -> Tensor | float:
    """Return a tensor as a detached copy without dimensions, and a number as a float."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"metric {key!r} has shape {tuple(value.shape)}; log one number, or one key for each")
        if value.is_complex():
            raise TypeError(f"metric {key!r} is complex; log its abs(), or its parts")
        return value.detach().reshape(()).clone()
    try:
        return value.__float__()  # float() would also accept text such as "1"
    except (AttributeError, TypeError):
        allowed = "must be a number or a tensor with one element; text goes into log_tags or log_table"
        raise TypeError(f"metric {key!r}={value!r}: {allowed}") from None


def join(records: Sequence[MetricRecord]) -> list[MetricRecord]:
    """Merge adjacent records of the same moment, because several callbacks log metrics of the same batch.

    Metrics are merged into the dict of the first record. A record that repeats a key stays separate.
    """
    joined: list[MetricRecord] = []
    metrics: dict[str, Any] = {}
    step = -1
    timestamp = None
    for record in records:
        # Timestamps are immutable, so the same object means the same moment.
        if record.timestamp is timestamp and record.step == step and metrics.keys().isdisjoint(record.metrics):
            metrics.update(record.metrics)
        else:
            metrics, step, timestamp, _ = record
            joined.append(record)
    return joined


def read_back(records: Sequence[MetricRecord]) -> None:
    """Replace tensors in records with floats, in place, with one sync for each dtype on each device."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str]]] = {}
    for metrics, *_ in records:
        for key, value in metrics.items():
            if type(value) is not float:
                if value.is_cpu:
                    metrics[key] = float(value.item())
                else:
                    groups.setdefault((value.device, value.dtype), []).append((metrics, key))
    for entries in groups.values():
        # The intended host-device sync, on the logger's own thread.
        values = torch.stack([metrics[key] for metrics, key in entries])
        for (metrics, key), value in zip(entries, to_list(values), strict=True):
            metrics[key] = float(value)
