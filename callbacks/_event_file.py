"""Writes TensorBoard's event files: a sequence of events, each with checksums."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class EventFile:
    """A new event file in a folder, which is created if it does not exist.

    TensorBoard's own writer computes checksums byte by byte in Python, which costs more than the rest of logging.

    Args:
        folder: the folder given to `tensorboard --logdir`, or one inside it.
        first_step: TensorBoard hides what other files in the folder hold from this step on; None hides nothing.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names, so the name starts with the time.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self._file = (folder / name).open("ab", buffering=0)
        self._size = 0
        self._writing = threading.Lock()
        self.write([{"wall_time": time.time(), "file_version": "brain.Event:2"}])
        if first_step is not None:
            session = SessionLog(status=SessionLog.START)
            self.write([{"wall_time": time.time(), "step": first_step, "session_log": session}])

    def write(self, events: Iterable[dict[str, Any]]) -> None:
        """Append events, given as fields of TensorBoard's `Event`, in one write: all or none. Safe from any thread.

        Raises:
            OSError: the disk is full.
        """
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        everything = b"".join([_frame(Event(**event).SerializeToString()) for event in events])
        with self._writing:
            if self._file.write(everything) < len(everything):
                self._file.truncate(self._size)  # half an event would hide everything after it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(everything)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _frame(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + checksum(length) + content + checksum(content)


def checksum(content: bytes) -> bytes:
    """Return the 4-byte checksum that event files use: CRC-32C, rotated and offset."""
    import google_crc32c

    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
