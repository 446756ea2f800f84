"""What processes that read batches talk through: unlike multiprocessing's own, it blocks nobody when one is killed."""

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
    """An event of several processes that is set once, without the lock that guards those of multiprocessing."""

    def __init__(self, context: Any) -> None:
        self._flag = context.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._flag.value)

    def set(self) -> None:
        self._flag.value = 1


class _Queue(multiprocessing.queues.Queue):
    """A queue of processes whose ``get`` raises ``Empty`` in the middle of a message too, and goes on there next."""

    def _reset(self, after_fork: bool = False) -> None:
        reset: Any = super()
        reset._reset(after_fork)
        state = vars(self)
        state.pop("_recv_bytes", None)  # that of the pipe, which waits without end
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
        """Read until `size` bytes of the message are there, as long as any comes within a second."""
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
    """Return a context of multiprocessing like another, in which no worker's death blocks this process.

    Torch tells workers by an event that they are to end, and both sides ask for it all the time. Who is killed while
    asking keeps the lock of multiprocessing's event, for which everybody else then waits without end. Of who is killed
    while writing a batch, multiprocessing's queue awaits the rest without end, unless a signal tells of the death: it
    does not where another thread reads, or with forkserver.

    Args:
        context: a context, the name of its start method, or None for that of this process.
    """
    methods = multiprocessing.get_all_start_methods()  # the first is the default
    if context is None:
        context = multiprocessing.get_start_method(allow_none=True) or methods[0]
    if context in methods:
        context = multiprocessing.get_context(context)
    if isinstance(context, multiprocessing.context.BaseContext):
        context, given = copy.copy(context), context
        vars(context)["Event"] = partial(_Event, given)
        vars(context)["Queue"] = partial(_Queue, ctx=given)
    return context  # what is none is refused by torch, in its own words
