"""Keeps logged values in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination

if TYPE_CHECKING:
    from runner import Logger, MetricRecord, State, Timestamp


class InMemoryLogger(LoggerDestination):
    """Keeps everything logged on this rank as Python values, for notebooks, tests and other callbacks.

    It works on all ranks. Checkpoints contain none of it, so a resumed run starts empty.

    Attributes:
        hyperparameters: nested hyperparameters, as last logged.
        tables: `{"columns", "rows", "step"}` by name, each as last logged.
        images: lists of `{"images", "step", "captions"}` by name.
        artifacts: list of pairs of path and folder.
    """

    all_ranks = True

    def __init__(self) -> None:
        self.hyperparameters: dict[str, Any] = {}
        self.tables: dict[str, dict[str, Any]] = {}
        self.images: dict[str, list[dict[str, Any]]] = {}
        self.artifacts: list[tuple[str, str | None]] = []
        self._data: dict[str, list[tuple[Timestamp, float]]] = {}
        self._records: list[MetricRecord] = []  # not in `_data` yet: access to it sorts them by key
        self._lock = threading.Lock()  # records arrive on another thread
        self._logger: Logger | None = None

    @property
    def data(self) -> dict[str, list[tuple[Timestamp, float]]]:
        """Pairs of timestamp and value by metric key, in the order of logging and complete up to this moment.

        The `batch` of a timestamp is the step at which the value was logged.
        """
        if self._logger is not None:
            self._logger.flush()
        with self._lock:
            for record in self._records:
                timestamp = record.timestamp
                if timestamp.batch != record.step:
                    timestamp = timestamp._replace(batch=record.step)
                for key, value in record.metrics.items():
                    self._data.setdefault(key, []).append((timestamp, value))
            self._records.clear()
        return self._data

    def get_timeseries(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a metric.

        Raises:
            KeyError: the metric was not logged; the message lists the logged ones.
        """
        data = self.data
        if key not in data:
            raise KeyError(f"key={key!r} was not logged; there are {', '.join(data) or 'none yet'}")
        return [timestamp.batch for timestamp, _ in data[key]], [value for _, value in data[key]]

    def init(self, state: State, logger: Logger) -> None:
        self._logger = logger

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self.hyperparameters |= hyperparameters

    def log_records(self, records: Sequence[MetricRecord]) -> None:
        with self._lock:
            self._records += records

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        self.tables[name] = {"columns": list(columns), "rows": [list(row) for row in rows], "step": step}

    def log_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None = None) -> None:
        self.images.setdefault(name, []).append({"images": images, "step": step, "captions": captions})

    def log_artifact(self, path: Any, name: str | None = None) -> None:
        self.artifacts.append((str(path), name))
