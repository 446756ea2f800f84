"""The spool of a run: JSON lines that the trainer appends and the writer process sends.

It imports only the standard library, except for encoding metrics in the trainer.

`<run folder>/mlflow/` holds `spool.jsonl` (the data), `run.json` (where it goes), `sent.json` (how much has been sent),
`writer.log`, and images and files that are not sent yet.
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
from runner.files.whole import read_object, write_whole

SPOOL = "spool.jsonl"
IMAGES = "images"  # folder of images that are removed once they are sent
FILES = "files"  # folder of copied artifacts and models, which are removed likewise
MODEL = "model.pt2"  # name of an exported model
EXAMPLE = "example.npy"  # name of its input example
CHUNK = 1 << 20  # bytes of the spool to read at a time
TAIL = 1 << 16  # bytes before a checkpoint's position, with what is logged there again when the run goes on
METRICS_PER_CALL = 1000  # the most that MLflow takes
LOSS = "loss/train/total"  # metric by which a batch that is trained again is compared
SAME_LOSS = 1e-3  # relative tolerance; on a GPU or on other ranks, rounding differs

Line = tuple[dict[str, Any] | None, int]  # an entry, None for a torn line, and the offset of its end


@dataclass
class Sent:
    """How much of a spool a store holds; written after each successful send."""

    tracking_uri: str
    run_id: str | None = None
    offset: int = 0
    """Bytes of the spool that the store has."""
    ended: bool = False
    """Whether the last entry sent was a final status."""
    postponed: list[int] = field(default_factory=list)
    """Offsets of earlier entries with files that the artifact store did not accept."""
    sent_at: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, list[Any]] = field(default_factory=dict)
    """What `Thinning` knows after these bytes, if it is used."""


def is_id(value: object) -> TypeGuard[str]:
    """Return whether a value has exactly the form of an id of a run or spool."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def now_ms() -> int:
    """Return the milliseconds since 1970, the unit of time in MLflow."""
    return time.time_ns() // 1_000_000


def open_log(run_dir: Path) -> IO[str]:
    """Open the log of a run's deliveries, readable by its owner only, because traces may contain full addresses."""
    path = run_dir / "mlflow" / "writer.log"
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")


def read_sent(folder: Path, tracking_uri: str) -> Sent:
    """Return how much of the spool in `folder` the store at `tracking_uri` holds.

    For another store, or if `sent.json` is damaged, that is nothing: the run is then found by the id of its spool, and
    values that the store already has are not stored twice.
    """
    saved = read_object(folder / "sent.json")
    is_same = saved.get("tracking_uri") == without_credentials(tracking_uri)
    try:
        sent = Sent(**{**saved, "tracking_uri": tracking_uri})
        size = (folder / SPOOL).stat().st_size
        is_whole = all(type(number) is int and 0 <= number <= size for number in (sent.offset, *sent.postponed))
        is_whole &= {type(time) for time in sent.sent_at.values()} <= {int}
        is_whole &= all(_is_value(value) for value in sent.left_out.values())
    except (OSError, TypeError, AttributeError):
        return Sent(tracking_uri)
    return sent if is_same and is_whole else Sent(tracking_uri)


def _is_value(value: Any) -> bool:
    """Return whether a JSON value is what `Thinning` keeps of a key: a number, its step and its time."""
    return isinstance(value, list) and [*map(type, value)] in ([float, int, int], [int, int, int])


def has_trainer(run_dir: Path) -> bool:
    """Return whether a trainer that is alive adds to a run's spool."""
    lock = lock_file(run_dir / "mlflow" / "trainer.lock")
    if lock is not None:
        lock.close()
    return lock is None


# Created once, because json.dumps with other separators creates an encoder at each call.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


def write_sent(folder: Path, sent: Sent) -> None:
    """Save how much was sent, so that another writer can continue and the run can be found by its id."""
    shown = {"tracking_uri": without_credentials(sent.tracking_uri)}
    write_whole(folder / "sent.json", json.dumps(vars(sent) | shown))


def read_entries(path: Path, offset: int = 0, limit: int | None = CHUNK) -> Iterator[Line]:
    """Yield the complete lines after `offset`, about `limit` bytes of them, each with the offset of its end.

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
    """Return whether a spool entry holds metrics in the form written here."""
    return entry is not None and isinstance(entry.get("m"), dict) and {type(entry.get(key)) for key in "st"} == {int}


class Spool:
    """The trainer's end of a spool, safe to use from several threads.

    Args:
        folder: folder of the spool, created if it does not exist.
        since: position of the spool at the checkpoint from which the run goes on; 0 if there is none.

    Attributes:
        departed: first retrained batch with a different loss than in an earlier session, or None.
        since: the position given, or the size that the spool had when it was opened, if that is smaller.
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
        self._began = 0  # offset of the first line with this step
        self._written: dict[int, tuple[frozenset[str], float | None]] | None = None
        self.departed: int | None = None

    @property
    def exclusive(self) -> bool:
        """Whether this is the only trainer writing to the spool."""
        return self._alive is not None

    @property
    def resumed(self) -> bool:
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

        A resumed run trains the batches after its checkpoint again, and their keys and steps are in the spool already.
        If their loss differs, because something was changed, all metrics from then on are appended.
        """
        from runner.callbacks._json_lines import encode_line

        entries = []
        for metrics, step, seconds in records:
            if self._inherited and self.departed is None:
                metrics = self._not_written(metrics, step)
            if entries and entries[-1]["s"] == step and entries[-1]["m"].keys().isdisjoint(metrics):
                entries[-1]["m"] = entries[-1]["m"] | metrics  # several callbacks log metrics of the same batch
            elif metrics:
                entries.append({"m": metrics, "s": step, "t": int(seconds * 1000)})
        lines = [encode_line(entry, _encode) for entry in entries]
        offset = self.size
        for entry, line in zip(entries, lines, strict=True):
            if entry["s"] != self._step:
                self._step = entry["s"]
                self._began = offset
            offset += len(line)
        if lines:
            self._write(b"".join(lines))

    def position(self, batch: int) -> int:
        """Return the offset from which on a run that goes on from this batch finds what it may log again.

        That includes the metrics of this batch, which may be long lines.
        """
        is_ahead = not self._inherited or (self._written is not None and batch > max(self._written, default=0))
        if not is_ahead:
            return self.since
        return self._began if self._step >= batch else self.size

    def sync(self) -> None:
        """Sync the spool to disk, so that it survives a power cut.

        Raises:
            OSError: the disk refused the write.
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
        """Return the metrics of a step that no earlier session wrote, or all if this session departs from it."""
        if self._written is None:
            self._written = self._read_written()
        keys, loss = self._written.get(step, (frozenset(), None))
        if loss is not None and LOSS in metrics and not _is_same(metrics[LOSS], loss):
            self.departed = step
            return metrics
        return {key: value for key, value in metrics.items() if key not in keys}

    def _read_written(self) -> dict[int, tuple[frozenset[str], float | None]]:
        """Return the keys that earlier sessions wrote after the checkpoint and the last loss, for each step."""
        written: dict[int, tuple[frozenset[str], float | None]] = {}
        shared: dict[frozenset[str], frozenset[str]] = {}  # most steps have the same keys and share one set
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
