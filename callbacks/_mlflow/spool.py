"""The spool of a run: JSON lines that the trainer appends and the writer process sends.

Standard library only, but for what the trainer logs in every batch.

`<run folder>/mlflow/` holds `spool.jsonl` (the truth), `run.json` (where it goes), `sent.json` (how much of it is
there), `writer.log`, and the images that were not sent yet.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, TypeGuard

from runner.addresses import without_credentials
from runner.files.whole import read_object, write_whole

SPOOL = "spool.jsonl"
IMAGES, FILES = "images", "files"  # folders of what is sent, and removed then
CHUNK = 1 << 20  # bytes of spool that are read, sent and marked as sent together
LOSS = "loss/train/total"  # by which a batch that is trained again is compared
SAME_LOSS = 1e-3  # as a share of it: on a GPU, or on other ranks, the same batch gives another rounding


@dataclass
class Sent:
    """How much of a spool a store holds; written after each successful send."""

    tracking_uri: str
    run_id: str | None = None
    offset: int = 0
    lines: int = 0
    ended: bool = False
    """Whether the last entry sent was a final status."""
    postponed: list[int] = field(default_factory=list)
    """Offsets before it of entries with files, which the store of artifacts did not take."""


def is_id(value: object) -> TypeGuard[str]:
    """Whether something is the id of a run or of a spool, and nothing that could mean more."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def now_ms() -> int:
    """Milliseconds since 1970, as MLflow counts."""
    return time.time_ns() // 1_000_000


def open_log(run_dir: Path) -> IO[str]:
    """Where the traces of a run's deliveries go, for its owner only: libraries may name an address in full."""
    path = run_dir / "mlflow" / "writer.log"
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")


def read_sent(folder: Path, tracking_uri: str) -> Sent:
    """How much of the spool in `folder` the store at `tracking_uri` holds: nothing, where it is another store.

    Nothing either where `sent.json` is torn: the run is found again by its spool, and a store knows what it has.
    """
    saved = read_object(folder / "sent.json")
    is_same = saved.get("tracking_uri") == without_credentials(tracking_uri)
    try:
        sent, size = Sent(**{**saved, "tracking_uri": tracking_uri}), (folder / SPOOL).stat().st_size
        numbers = [sent.lines, sent.offset, *sent.postponed]
        is_whole = all(type(one) is int and 0 <= one <= size for one in numbers)
    except (OSError, TypeError):
        return Sent(tracking_uri)
    return sent if is_same and is_whole else Sent(tracking_uri)


# Made once: json.dumps makes an encoder at each call that asks for other separators.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


def write_sent(folder: Path, sent: Sent) -> None:
    """Keep what was sent, so that another writer can go on from there, and that others find the run by its id."""
    shown = {"tracking_uri": without_credentials(sent.tracking_uri)}
    write_whole(folder / "sent.json", json.dumps(asdict(sent) | shown))


def read_entries(path: Path, offset: int = 0, limit: int | None = CHUNK) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield the complete lines after `offset`, about `limit` bytes of them, each with the offset of its end.

    A line that is no JSON object (a write that was cut off) comes as None.
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


def is_metrics(entry: dict[str, Any] | None) -> bool:
    """Whether an entry of a spool is of metrics, and shaped as they are written here."""
    return entry is not None and isinstance(entry.get("m"), dict) and {type(entry.get(key)) for key in "st"} == {int}


def try_lock(path: Path) -> IO[bytes] | None:
    """A file that is locked until it is closed or this process ends; None when another process holds the lock.

    The lock is POSIX's, which forked data loader workers do not inherit.
    """
    file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return None
    except OSError:
        pass  # a file system without locks: two writers of one run are then kept apart by nothing but habit
    return file


class Spool:
    """The trainer's end of a spool, safe to use from several threads.

    Args:
        folder: made when it does not exist.

    Attributes:
        departed: the first batch that was trained again with another loss than an earlier session's; None: none was.

    Raises:
        OSError: the folder or the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / SPOOL
        self._alive = try_lock(folder / "trainer.lock")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._inherited = os.fstat(self._fd).st_size
        self._torn = self._inherited > 0 and os.pread(self._fd, 1, self._inherited - 1) != b"\n"
        self._written: dict[int, tuple[frozenset[str], float | None]] | None = None
        self.departed: int | None = None
        with self.path.open("rb") as file:
            self.lines = sum(block.count(b"\n") for block in iter(lambda: file.read(CHUNK), b""))

    @property
    def exclusive(self) -> bool:
        """Whether no other trainer writes to it."""
        return self._alive is not None

    @property
    def resumed(self) -> bool:
        """Whether an earlier session wrote to it."""
        return self._inherited > 0

    def append(self, *entries: dict[str, Any]) -> None:
        """Add entries with one write.

        Raises:
            OSError: the disk is full, or the spool is closed.
        """
        self._write("".join([_encode(entry) + "\n" for entry in entries]).encode())

    def _write(self, data: bytes) -> None:
        with self._lock:
            data = b"\n" + data if self._torn else data
            written = os.write(self._fd, data)
            self._torn = written < len(data)
            self.lines += data[:written].count(b"\n")
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes could be written to {self.path}")

    def append_metrics(self, records: Iterable[tuple[dict[str, float], int, float]]) -> None:
        """Add metrics, each with its step and its time in seconds, without those that an earlier session wrote.

        A resumed run trains the batches since its checkpoint again: their keys and steps are here already. Where they
        come out otherwise, because something was changed, all that follow are added.
        """
        from runner.callbacks._json_lines import encode_line

        entries = []
        for metrics, step, seconds in records:
            if self._inherited and self.departed is None:
                metrics = self._not_written(metrics, step)
            if entries and entries[-1]["s"] == step and entries[-1]["m"].keys().isdisjoint(metrics):
                entries[-1]["m"] = entries[-1]["m"] | metrics  # a batch's metrics come from several callbacks
            elif metrics:
                entries.append({"m": metrics, "s": step, "t": int(seconds * 1000)})
        if entries:
            self._write(b"".join([encode_line(entry, _encode) for entry in entries]))

    def sync(self) -> None:
        """Have what was added so far survive a power cut.

        Raises:
            OSError: the disk does not take it.
        """
        os.fsync(self._fd)

    def close(self) -> None:
        """Close it and say so to other processes."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1
            if self._alive is not None:
                self._alive.close()

    def _not_written(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """Return those of a step that no earlier session wrote; all, where this one departs from it."""
        if self._written is None:
            self._written = self._read_written(step)
        keys, loss = self._written.get(step, (frozenset(), None))
        if loss is not None and LOSS in metrics and not _is_same(metrics[LOSS], loss):
            self.departed = step
            return metrics
        return {key: value for key, value in metrics.items() if key not in keys}

    def _read_written(self, first_step: int) -> dict[int, tuple[frozenset[str], float | None]]:
        """Return the keys that earlier sessions wrote and the last one's loss, by step, from a step on."""
        written: dict[int, tuple[frozenset[str], float | None]] = {}
        shared: dict[frozenset[str], frozenset[str]] = {}  # most steps have the same keys: one set serves them all
        for entry, end in read_entries(self.path, limit=None):
            if end > self._inherited:
                break
            if entry is not None and is_metrics(entry) and entry["s"] >= first_step:
                keys, loss = written.get(entry["s"], (frozenset(), None))
                keys = keys.union(entry["m"])
                written[entry["s"]] = shared.setdefault(keys, keys), entry["m"].get(LOSS, loss)
        return written


def _is_same(loss: float, before: float) -> bool:
    return math.isclose(loss, before, rel_tol=SAME_LOSS, abs_tol=1e-6) or (math.isnan(loss) and math.isnan(before))
