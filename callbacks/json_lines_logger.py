"""Logs to a file of JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination
from runner.failures.checks import check_inner_path
from runner.files.values import InnerPath
from runner.libraries.extras import require

if TYPE_CHECKING:
    from runner import Logger, MetricRecord, State, Timestamp


class JSONLinesLogger(LoggerDestination):
    """Writes a file in the run's folder with one JSON object per line, which can be read without a library.

    A record of metrics is `{"step", "epoch", "sample", "token", "wall_time", "metrics"}`. Hyperparameters, tables and
    artifacts have separate lines; images are not written. Numbers that JSON cannot represent become the strings
    "NaN", "Infinity" and "-Infinity". A resumed run removes the lines written after the batch that it resumes from, and
    appends to the rest.

    Args:
        filename: path of the file, relative to the run's folder.

    Raises:
        ValueError: `filename` is absolute or leads out of the run's folder.
        ImportError: the package orjson is missing.
    """

    def __init__(self, filename: InnerPath = "metrics.jsonl") -> None:
        check_inner_path("filename", filename, "metrics.jsonl")
        require("JSONLinesLogger", None, "orjson")
        self.filename = filename
        self.path: Path | None = None
        self._state: State | None = None
        self._started = False

    def init(self, state: State, logger: Logger) -> None:
        self._started = False
        self._state = state
        self.path = Path(state.run_dir).resolve() / self.filename
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._rewrite(None)
        if state.config:
            self.log_hyperparameters(state.config)

    def fit_start(self, state: State, logger: Logger) -> None:
        if not self._started and self.path is not None and self.path.exists():
            logger.flush()  # so that the logger's thread does not write during the rewrite
            self._rewrite(state.timestamp)
        self._started = True

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        line = _to_line({"hyperparameters": hyperparameters})
        if self.path is not None and self.path.exists():
            with self.path.open("rb") as file:  # line by line, because the file of a long run is large
                if line in file:
                    return
        self._write([line])

    def log_records(self, records: Sequence[MetricRecord]) -> None:
        from runner.callbacks._json_lines import encode_line

        self._write([encode_line(_describe(record), _encode) for record in records])

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        epoch = self._state.timestamp.epoch if self._state is not None else 0
        self._write([_to_line({"table": name, "step": step, "epoch": epoch, "columns": columns, "rows": rows})])

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        self._write([_to_line({"artifact": str(path), "folder": name})])

    def _write(self, lines: Sequence[bytes]) -> None:
        if self.path is not None:
            # Open the file for each group of records, at most four times a second, so that nothing stays buffered.
            with self.path.open("ab") as file:
                file.write(b"".join(lines))

    def _rewrite(self, until: Timestamp | None) -> None:
        """Replace the file atomically with its complete lines, up to the time `until` unless it is None.

        Values logged at the end of an epoch have the step of its last batch, from which a run may be resumed.
        """
        assert self.path is not None
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with self.path.open("rb") as old, temporary.open("wb") as new:
            for line in old:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # truncated when the run was killed
                time = entry.get("step", 0), entry.get("epoch", 0)
                if line.endswith(b"\n") and (until is None or time <= (until.batch, until.epoch)):
                    new.write(line)
        os.replace(temporary, self.path)


def _describe(record: MetricRecord) -> dict[str, Any]:
    now = record.timestamp
    return {
        "step": record.step,
        "epoch": now.epoch,
        "sample": now.sample,
        "token": now.token,
        "wall_time": record.wall_time,
        "metrics": record.metrics,
    }


def _to_line(entry: Mapping[str, Any]) -> bytes:
    return (_encode(entry) + "\n").encode()


def _encode(entry: Mapping[str, Any]) -> str:
    return json.dumps(_to_json(entry), allow_nan=False, separators=(",", ":"), default=str)


def _to_json(value: Any) -> Any:
    """Return the value with numbers that JSON cannot represent as strings."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
