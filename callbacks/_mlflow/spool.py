"""The spool of a run: JSON lines that the trainer appends and the writer process sends.

This module imports only the standard library, except for encoding metrics in the trainer.

`<run folder>/mlflow/` holds `spool.jsonl` (the data), `run.json` (its destination), `sent.json` (how much has been
sent), `writer.log`, and images and files that are not sent yet.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeGuard

from runner.files.addresses import without_credentials
from runner.files.lock import lock_file
from runner.files.whole import read_object, write_atomically

SPOOL = "spool.jsonl"
IMAGES = "images"  # folder of images, which are removed once they are sent
FILES = "files"  # folder of copied artifacts and of models, which are also removed once they are sent
MODEL = "model.pt2"  # file name of an exported model
TEXT_MODEL = "transformers"  # folder of a transformers model with its tokenizer
IMAGE_MODEL = "image_classifier"  # folder of a program with the code that prepares its images
EXAMPLE = "example.npy"  # file name of its input example
CHUNK = 1 << 20  # bytes of the spool to read at a time
TAIL = 1 << 16  # bytes before a checkpoint's position that may hold values that a resumed run logs again
METRICS_PER_CALL = 1000  # the most that MLflow takes
LOSS = "loss/train/total"  # the metric by which a batch and its retraining are compared
SAME_LOSS = 1e-3  # relative tolerance, because rounding differs on a GPU or with other ranks

Line = tuple[dict[str, Any] | None, int]  # an entry (None for a torn line), and the offset of its end


@dataclass
class Sent:
    """How much of a spool a store has, recorded after each successful send."""

    tracking_uri: str
    run_id: str | None = None
    offset: int = 0
    """Bytes of the spool that the store has."""
    ended: bool = False
    """Whether the last entry sent was a final status."""
    postponed: list[int] = field(default_factory=list)
    """Offsets of earlier entries whose files the artifact store did not accept."""
    sent_at: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, list[Any]] = field(default_factory=dict)
    """The state of `Thinning` after these bytes, if it is used."""


def is_id(value: object) -> TypeGuard[str]:
    """Return whether a value has the exact form of the id of a run or spool."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def now_ms() -> int:
    """Return the time in milliseconds since 1970, as MLflow counts it."""
    return time.time_ns() // 1_000_000


def open_log(run_dir: Path) -> IO[str]:
    """Open the log of a run's deliveries. Only its owner can read it, because traces may contain full addresses."""
    path = run_dir / "mlflow" / "writer.log"
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")


def read_sent(folder: Path, tracking_uri: str) -> Sent:
    """Return how much of the spool in `folder` the store at `tracking_uri` has.

    For another store, or if `sent.json` is damaged, return that it has nothing: the run is then found by the id of its
    spool, and values that the store already has are not stored twice.
    """
    saved = read_object(folder / "sent.json")
    is_same = saved.get("tracking_uri") == without_credentials(tracking_uri)
    try:
        sent = Sent(**{**saved, "tracking_uri": tracking_uri})
        size = (folder / SPOOL).stat().st_size
        is_valid = all(type(number) is int and 0 <= number <= size for number in (sent.offset, *sent.postponed))
        is_valid &= {type(time) for time in sent.sent_at.values()} <= {int}
        is_valid &= all(_is_value(value) for value in sent.left_out.values())
    except (OSError, TypeError, AttributeError):
        return Sent(tracking_uri)
    return sent if is_same and is_valid else Sent(tracking_uri)


def _is_value(value: Any) -> bool:
    """Return whether a JSON value is a metric's value with its step and its time, as `Thinning` keeps it."""
    return isinstance(value, list) and [*map(type, value)] in ([float, int, int], [int, int, int])


def has_trainer(run_dir: Path) -> bool:
    """Return whether a living trainer adds to a run's spool."""
    lock = lock_file(run_dir / "mlflow" / "trainer.lock")
    if lock is not None:
        lock.close()
    return lock is None


# Created only once: with these separators, json.dumps would create an encoder at each call.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


def write_sent(folder: Path, sent: Sent) -> None:
    """Save how much was sent, so that another writer can continue, and the run's id, so that it can be found."""
    shown = {"tracking_uri": without_credentials(sent.tracking_uri)}
    write_atomically(folder / "sent.json", json.dumps(vars(sent) | shown))


def read_entries(path: Path, offset: int = 0, limit: int | None = CHUNK) -> Iterator[Line]:
    """Yield about `limit` bytes of complete lines after `offset`, each with the offset of its end.

    A line that is not a JSON object, because a write was interrupted, is yielded as None.
    """
    with path.open("rb") as file:
        file.seek(offset)
        end = offset
        while (limit is None or end - offset < limit) and (line := file.readline()).endswith(b"\n"):
            end += len(line)
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            yield (entry if isinstance(entry, dict) else None), end


def is_metrics(entry: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Return whether a spool entry holds metrics in the form that `Spool` writes."""
    return entry is not None and isinstance(entry.get("m"), dict) and {type(entry.get(key)) for key in "st"} == {int}


class Spool:
    """The trainer's end of a spool, safe to use from several threads.

    Args:
        folder: folder of the spool, created if it does not exist.
        since: position in the spool of the checkpoint from which the run is resumed; 0 without a checkpoint.

    Attributes:
        departed_at: first retrained batch whose loss differs from that in an earlier session, or None.
        since: the argument `since`, at most the size of the spool when it was opened.
        size: bytes in the spool.

    Raises:
        OSError: the folder or the file cannot be created.
    """

    def __init__(self, folder: Path, since: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / SPOOL
        self._alive = lock_file(folder / "trainer.lock")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._inherited = self.size = os.fstat(self._fd).st_size
        self._torn = self._inherited > 0 and os.pread(self._fd, 1, self._inherited - 1) != b"\n"
        self.since = min(since, self._inherited)
        self._step = -1  # of the last metrics
        self._step_start = 0  # offset of the first line with this step
        self._written: dict[int, tuple[frozenset[str], float | None]] | None = None
        self.departed_at: int | None = None

    @property
    def is_exclusive(self) -> bool:
        """Whether this is the only trainer writing to the spool."""
        return self._alive is not None

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier session wrote to the spool."""
        return self._inherited > 0

    def append(self, *entries: dict[str, Any]) -> None:
        """Append entries in one write.

        Raises:
            OSError: the disk is full, or the spool is closed.
        """
        self._write("".join([_encode(entry) + "\n" for entry in entries]).encode())

    def _write(self, data: bytes) -> None:
        with self._lock:
            data = b"\n" + data if self._torn else data
            written = os.write(self._fd, data)
            self._torn = written < len(data)
            self.size += written
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes could be written to {self.path}")

    def append_metrics(self, records: Iterable[tuple[dict[str, float], int, float]]) -> None:
        """Append metrics, each with its step and its time in seconds, except those that an earlier session wrote.

        A resumed run retrains the batches after its checkpoint, and their keys and steps are already in the spool. If
        the loss of a batch differs, because something was changed, all metrics from that batch on are appended.
        """
        from runner.callbacks._json_lines import encode_line

        entries = []
        for metrics, step, seconds in records:
            if self._inherited and self.departed_at is None:
                metrics = self._not_written(metrics, step)
            if entries and entries[-1]["s"] == step and entries[-1]["m"].keys().isdisjoint(metrics):
                entries[-1]["m"] = entries[-1]["m"] | metrics  # several callbacks may log metrics of the same batch
            elif metrics:
                entries.append({"m": metrics, "s": step, "t": int(seconds * 1000)})
        lines = [encode_line(entry, _encode) for entry in entries]
        offset = self.size
        for entry, line in zip(entries, lines, strict=True):
            if entry["s"] != self._step:
                self._step = entry["s"]
                self._step_start = offset
            offset += len(line)
        if lines:
            self._write(b"".join(lines))

    def position(self, batch: int) -> int:
        """Return the offset for a checkpoint at `batch`: whatever a run resumed from it may log again comes later.

        That includes the metrics of `batch` itself, whose lines may be longer than `TAIL`.
        """
        is_ahead = not self._inherited or (self._written is not None and batch > max(self._written, default=0))
        if not is_ahead:
            return self.since
        return self._step_start if self._step >= batch else self.size

    def sync(self) -> None:
        """Sync the spool to disk, so that it survives a power cut.

        Raises:
            OSError: the write failed.
        """
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the spool and release its lock."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1
            if self._alive is not None:
                self._alive.close()

    def _not_written(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """Return the metrics of a step that no earlier session wrote, or all of them if the loss differs."""
        if self._written is None:
            self._written = self._read_written()
        keys, loss = self._written.get(step, (frozenset(), None))
        if loss is not None and LOSS in metrics and not _is_same(metrics[LOSS], loss):
            self.departed_at = step
            return metrics
        return {key: value for key, value in metrics.items() if key not in keys}

    def _read_written(self) -> dict[int, tuple[frozenset[str], float | None]]:
        """Return, by step, the keys that earlier sessions wrote after the checkpoint, and their last loss."""
        written: dict[int, tuple[frozenset[str], float | None]] = {}
        shared: dict[frozenset[str], frozenset[str]] = {}  # most steps have the same keys, and share one set
        for entry, end in read_entries(self.path, max(self.since - TAIL, 0), limit=None):
            if end > self._inherited:
                break
            if is_metrics(entry):
                keys, loss = written.get(entry["s"], (frozenset(), None))
                keys = keys.union(entry["m"])
                written[entry["s"]] = shared.setdefault(keys, keys), entry["m"].get(LOSS, loss)
        return written


def _is_same(loss: float, before: float) -> bool:
    return math.isclose(loss, before, rel_tol=SAME_LOSS, abs_tol=1e-6) or (math.isnan(loss) and math.isnan(before))
