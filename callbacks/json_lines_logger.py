"""Writes what is logged as JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination
from runner.callbacks._extra import require

if TYPE_CHECKING:
    from runner import Logger, Record, State, Timestamp


class JSONLinesLogger(LoggerDestination):
    """A file in the run's folder with one JSON object a line, which needs no library to read.

    A record of metrics is `{"step", "epoch", "sample", "token", "wall_time", "metrics"}`; hyperparameters, tables and
    artifacts are lines of their own, images are not written. Numbers that JSON does not know are the strings "NaN",
    "Infinity" and "-Infinity". A resumed run appends to the file, after removing what was written past the batch that
    it resumes from.

    Args:
        filename: relative to the run's folder.

    Raises:
        ValueError: `filename` is absolute, or leads out of the run's folder.
        ImportError: the package orjson is missing.
    """

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        if not filename or Path(filename).is_absolute() or ".." in Path(filename).parts:
            raise ValueError(f"filename={filename!r}: must be a path inside the run's folder, such as 'metrics.jsonl'")
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
            logger.flush()  # after it, the logger's thread writes nothing until something is logged
            self._rewrite(state.timestamp)
        self._started = True

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        line = _to_line({"hyperparameters": hyperparameters})
        if self.path is not None and self.path.exists():
            with self.path.open("rb") as file:  # line by line: the file of a long run is large
                if line in file:
                    return
        self._write([line])

    def log_records(self, records: Sequence[Record]) -> None:
        from runner.callbacks._json_lines import encode_line

        self._write([encode_line(_describe(record), _encode) for record in records])

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        epoch = self._state.timestamp.epoch if self._state is not None else 0
        self._write([_to_line({"table": name, "step": step, "epoch": epoch, "columns": columns, "rows": rows})])

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        self._write([_to_line({"artifact": str(path), "folder": name})])

    def _write(self, lines: Sequence[bytes]) -> None:
        if self.path is not None:
            # Opened for each batch of records, four times a second at most, so that nothing is held back.
            with self.path.open("ab") as file:
                file.write(b"".join(lines))

    def _rewrite(self, until: Timestamp | None) -> None:
        """Keep the complete lines up to a time (None: all), replacing the file at once.

        What was logged at the end of an epoch has the step of its last batch, from which a run may be resumed.
        """
        assert self.path is not None
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with self.path.open("rb") as old, temporary.open("wb") as new:
            for line in old:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # cut off when the run was killed
                at = entry.get("step", 0), entry.get("epoch", 0)
                if line.endswith(b"\n") and (until is None or at <= (until.batch, until.epoch)):
                    new.write(line)
        os.replace(temporary, self.path)


def _describe(record: Record) -> dict[str, Any]:
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
    """The value with numbers that JSON does not know as strings."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
