"""Files that TensorBoard reads: its events, one after the other, each with checksums."""

from __future__ import annotations

import errno
import functools
import operator
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
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

        contents = [Event(**event).SerializeToString() for event in events]
        parts = zip(contents, masked_crc32c(contents), strict=True)
        everything = b"".join([_header(len(content)) + content + struct.pack("<I", crc) for content, crc in parts])
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
    return header + struct.pack("<I", *masked_crc32c([header]))


def masked_crc32c(contents: Sequence[bytes]) -> list[int]:
    """Return the checksum of each of several contents, CRC-32C with the mask that such files want."""
    import numpy as np

    lengths = [min(BLOCK, len(content) - start) for content in contents for start in range(0, len(content), BLOCK)]
    if not lengths:
        return [_mask(0)] * len(contents)
    rows = np.concatenate([_rows()[BLOCK - length :] for length in lengths])
    changes = _table()[rows + np.frombuffer(b"".join(contents), np.uint8)]
    # Of all blocks at once, as if each began at zero.
    blocks = zip(lengths, np.bitwise_xor.reduceat(changes, [0, *accumulate(lengths[:-1])]).tolist(), strict=True)
    found = []
    for content in contents:
        state = 0xFFFFFFFF
        for length, change in islice(blocks, -(-len(content) // BLOCK)):
            state = _after_zeros(state, length) ^ change
        found.append(_mask(state ^ 0xFFFFFFFF))
    return found


def _mask(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.lru_cache
def _after_zeros(state: int, length: int) -> int:
    """Return what a state becomes by so many zeros, at least one: it counts like the first bytes that follow."""
    table = _table().reshape(BLOCK, 256)
    head = state.to_bytes(4, "little")[:length]
    changes = (int(table[length - 1 - place, byte]) for place, byte in enumerate(head))
    return functools.reduce(operator.xor, changes, state >> 8 * len(head))


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
