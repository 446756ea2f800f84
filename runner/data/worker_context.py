"""Queues and events between a process and its workers that do not deadlock when a worker is killed."""

from __future__ import annotations

import copy
import multiprocessing
import multiprocessing.context
import multiprocessing.queues
import os
import queue
import struct
from functools import partial
from typing import Any


class _Event:
    """An event shared by processes that is set once; unlike multiprocessing's own, it has no lock."""

    def __init__(self, context: Any) -> None:
        self._flag = context.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._flag.value)

    def set(self) -> None:
        self._flag.value = 1


class _Queue(multiprocessing.queues.Queue):
    """A queue between processes whose ``get`` may raise ``Empty`` inside a message; the next one continues."""

    def _reset(self, after_fork: bool = False) -> None:
        reset: Any = super()
        reset._reset(after_fork)
        state = vars(self)
        state.pop("_recv_bytes", None)  # the pipe's own, which would wait forever
        state["_part"] = bytearray()
        os.set_blocking(state["_reader"].fileno(), False)

    def _recv_bytes(self) -> bytes:
        self._receive(4)
        (size,) = struct.unpack_from("!i", self._part)
        start = 4
        if size == -1:  # as multiprocessing.Connection sends messages from 2 GiB on
            self._receive(12)
            (size,) = struct.unpack_from("!Q", self._part, 4)
            start = 12
        self._receive(start + size)
        message = bytes(memoryview(self._part)[start:])
        self._part = bytearray()
        return message

    def _receive(self, size: int) -> None:
        """Read until `size` bytes of the message have arrived; raise ``Empty`` if none comes for a second."""
        reader = vars(self)["_reader"]
        while len(self._part) < size:
            try:
                chunk = os.read(reader.fileno(), min(size - len(self._part), 1 << 20))
            except BlockingIOError:
                if not reader.poll(1):
                    raise queue.Empty from None
                continue
            if not chunk:
                raise EOFError
            self._part += chunk


def make_context(context: Any = None) -> Any:
    """Return a copy of a multiprocessing context in which no worker's death blocks this process.

    Torch sets an event to tell workers to end, and both sides check it all the time. A worker killed during a check
    keeps the lock of multiprocessing's event, and everybody else then waits for it forever. When a worker is killed
    while it writes a batch, multiprocessing's queue waits for the rest forever, unless a signal reports the death; none
    does if another thread reads, or with forkserver.

    Args:
        context: a context, the name of its start method, or None for that of this process.
    """
    methods = multiprocessing.get_all_start_methods()  # the first is the default
    if context is None:
        context = multiprocessing.get_start_method(allow_none=True) or methods[0]
    if context in methods:
        context = multiprocessing.get_context(context)
    if isinstance(context, multiprocessing.context.BaseContext):
        given = context
        context = copy.copy(given)
        vars(context)["Event"] = partial(_Event, given)
        vars(context)["Queue"] = partial(_Queue, ctx=given)
    return context  # torch refuses anything that is not a context, in its own words
