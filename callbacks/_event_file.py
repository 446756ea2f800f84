"""Writes TensorBoard's event files: sequences of events with checksums."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner import MetricRecord

MAX_TEMPLATES = 64  # events kept for reuse, one for each set of keys; a run logs only a few different sets


class EventFile:
    """A new event file in a folder, which is created if it does not exist.

    TensorBoard's own writer computes checksums byte by byte in Python, which costs more than the rest of logging.

    Args:
        folder: the folder given to `tensorboard --logdir`, or one inside it.
        first_step: from this step on, TensorBoard hides values in other files of the folder; None hides nothing.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names, so the name starts with the time.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self._file = (folder / name).open("ab", buffering=0)
        self._size = 0
        self._writing = threading.Lock()
        self._templates: dict[tuple[str, ...], tuple[Any, list[Any]]] = {}  # an event and its values, by their keys
        self.write([{"wall_time": time.time(), "file_version": "brain.Event:2"}])
        if first_step is not None:
            session = SessionLog(status=SessionLog.START)
            self.write([{"wall_time": time.time(), "step": first_step, "session_log": session}])

    def write(self, events: Iterable[dict[str, Any]]) -> None:
        """Append events, given as fields of TensorBoard's `Event`, in one write: all or none. Thread-safe.

        Raises:
            OSError: the disk is full.
        """
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        with self._writing:
            self._append([Event(**event).SerializeToString() for event in events])

    def write_metrics(self, records: Sequence[MetricRecord]) -> None:
        """Append an event for each record, as `write` would, in a third of the time."""
        with self._writing:
            self._append([self._serialize(record) for record in records])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, contents: Iterable[bytes]) -> None:
        data = b"".join([_head(len(content)) + content + checksum(content) for content in contents])
        if self._file.write(data) < len(data):
            self._file.truncate(self._size)  # half an event would hide everything after it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(data)

    def _serialize(self, record: MetricRecord) -> bytes:
        """Return a record's event as bytes. Records with the same keys reuse one `Event`."""
        keys = tuple(record.metrics)
        if keys not in self._templates:
            from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            event = Event(summary={"value": [{"tag": key} for key in keys]})
            self._templates[keys] = event, [*event.summary.value]
        event, values = self._templates[keys]
        event.wall_time = record.wall_time
        event.step = record.step
        for value, number in zip(values, record.metrics.values(), strict=True):
            value.simple_value = number
        return event.SerializeToString()


@lru_cache(1024)
def _head(length: int) -> bytes:
    """Return the header of an event of `length` bytes: the length and its checksum."""
    packed = struct.pack("<Q", length)
    return packed + checksum(packed)


def checksum(content: bytes) -> bytes:
    """Return the 4-byte checksum that event files use: CRC-32C, rotated and offset."""
    import google_crc32c

    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
