"""Files that TensorBoard reads: its events, one after the other, each with checksums."""

from __future__ import annotations

import errno
import functools
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

BLOCK = 1024  # bytes of which a checksum is taken at once


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

        parts = []
        for event in events:
            data = Event(**event).SerializeToString()
            parts += [_header(len(data)), data, struct.pack("<I", masked_crc32c(data))]
        everything = b"".join(parts)
        with self._writing:
            if self._file.write(everything) < len(everything):
                self._file.truncate(self._size)  # half an event would hide all that follow
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(everything)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@functools.lru_cache
def _header(length: int) -> bytes:
    header = struct.pack("<Q", length)
    return header + struct.pack("<I", masked_crc32c(header))


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of data, CRC-32C with the mask that such files want."""
    import numpy as np

    state, table = 0xFFFFFFFF, _table()
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        # A state that was reached counts like bytes in front, and so like their sum with the first four that follow.
        head = int.from_bytes(block[:4], "little") ^ (state & (1 << 8 * min(4, len(block))) - 1)
        numbers = np.frombuffer(head.to_bytes(4, "little")[: len(block)] + block[4:], np.uint8)
        state >>= min(32, 8 * len(block))
        state ^= int(np.bitwise_xor.reduce(table[_rows()[BLOCK - len(block) :] + numbers]))
    crc = state ^ 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _table() -> np.ndarray:
    """Return what a byte does to the checksum, at index 256 * bytes that follow it + the byte: (BLOCK * 256,), 1 MB."""
    import numpy as np

    one = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = np.where(one & 1, one >> 1 ^ np.uint32(0x82F63B78), one >> 1)
    rows = [one]
    for _ in range(BLOCK - 1):
        rows.append(rows[-1] >> 8 ^ one[rows[-1] & 0xFF])
    return np.concatenate(rows)


@functools.cache
def _rows() -> np.ndarray:
    """Return where in the table the row of each byte of a block begins, (BLOCK,)."""
    import numpy as np

    return 256 * np.arange(BLOCK - 1, -1, -1)
