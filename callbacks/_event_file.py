"""Files that TensorBoard reads: its events, one after the other, each with checksums."""

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
    """A new file of events in a folder, which is made where there is none.

    TensorBoard's own writer takes checksums byte by byte in Python, which costs more than all else in logging.

    Args:
        folder: what `tensorboard --logdir` is given, or a folder in it.
        first_step: what other files of the folder hold from this step on is hidden; None: nothing is.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder by their names, which therefore begin with the time.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self._file = (folder / name).open("ab", buffering=0)
        self._size = 0
        self._writing = threading.Lock()
        self.write([{"wall_time": time.time(), "file_version": "brain.Event:2"}])
        if first_step is not None:
            session = SessionLog(status=SessionLog.START)
            self.write([{"wall_time": time.time(), "step": first_step, "session_log": session}])

    def write(self, events: Iterable[dict[str, Any]]) -> None:
        """Add events, given as fields of TensorBoard's `Event`, with one write: all of them or none. From any thread.

        Raises:
            OSError: the disk is full.
        """
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        everything = b"".join([_frame(Event(**event).SerializeToString()) for event in events])
        with self._writing:
            if self._file.write(everything) < len(everything):
                self._file.truncate(self._size)  # half an event would hide all that follow
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(everything)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _frame(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + checksum(length) + content + checksum(content)


def checksum(content: bytes) -> bytes:
    """Return what such files say of a content: CRC-32C, rotated and shifted, 4 bytes."""
    import google_crc32c

    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
