"""Queues and events between a process and its workers that do not deadlock when a worker is killed."""

from __future__ import annotations

import copy
import multiprocessing
import multiprocessing.context
import multiprocessing.queues
import os
import queue
import struct
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from runner.data.worker_process import WorkerProcess, blame, dump
from runner.distributed.fork_server import METHOD, start_fork_server


class _Event:
    """An event that is shared by processes and set once; unlike multiprocessing's, it has no lock."""

    def __init__(self, context: Any) -> None:
        self._flag = context.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._flag.value)

    def set(self) -> None:
        self._flag.value = 1


class _Queue(multiprocessing.queues.Queue):
    """A queue between processes whose `get` may raise `Empty` in the middle of a message; the next `get` continues."""

    def _reset(self, after_fork: bool = False) -> None:
        reset: Any = super()
        reset._reset(after_fork)
        state = vars(self)
        state.pop("_recv_bytes", None)  # the pipe's method, which would wait forever
        state["_part"] = bytearray()
        # For items that cannot be pickled. A bound method would keep the queue, its thread and its files alive forever.
        state["_on_queue_feeder_error"] = partial(_send_instead, weakref.ref(self))
        os.set_blocking(state["_reader"].fileno(), False)
        if not after_fork:
            # The finalizer keeps the ends of the pipe alive until the garbage collector has freed the queue. Otherwise
            # they would be closed first; torch's loader would then put its last item, and the thread that sends it
            # would close the same descriptors again, when they may already belong to other files.
            weakref.finalize(self, _do_nothing, state["_reader"], state["_writer"]).atexit = False

    def _recv_bytes(self) -> bytes:
        self._receive(4)
        (size,) = struct.unpack_from("!i", self._part)
        start = 4
        if size == -1:  # how multiprocessing.Connection marks messages of 2 GiB or more
            self._receive(12)
            (size,) = struct.unpack_from("!Q", self._part, 4)
            start = 12
        self._receive(start + size)
        message = bytes(memoryview(self._part)[start:])
        self._part = bytearray()
        return message

    def _receive(self, size: int) -> None:
        """Read until `size` bytes of the message have arrived; raise `Empty` if none comes for a second."""
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


def _do_nothing(*ends: Any) -> None:
    """Do nothing: the finalizer only has to hold references to the ends of a pipe."""


class _ByValue:
    """A pickled value, with its classes and functions, that is unpickled to the value itself."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (self._packed,)


def _send_instead(get_queue: Callable[[], _Queue | None], error: Exception, item: Any) -> None:
    """Send a substitute for an item that cannot be pickled; otherwise the reader would wait forever."""
    if (queue := get_queue()) is not None:
        queue.put(_make_sendable(item, error))


def _make_sendable(item: Any, error: Exception) -> Any:
    """Return a substitute that can be sent: the item pickled with its classes and functions, or else an error."""
    number, content = item
    try:
        return number, _ByValue(dump(content))
    except Exception:
        pass
    if isinstance(content, ExceptionWrapper):
        name = getattr(content.exc_type, "__qualname__", "an error")
        content.exc_msg = f"{name}, which cannot be sent ({error})\n{content.exc_msg}"
        content.exc_type = RuntimeError
        return number, content
    name, part = blame({"batch": content})
    reason = f"{name} is of type {type(part).__qualname__}: it cannot be sent from a data worker ({error})"
    try:
        raise TypeError(f"{reason}; return tensors, arrays, numbers, strings, and containers of them")
    except TypeError:
        return number, ExceptionWrapper(where="in a data worker")


def use_fork_server(loader: Any) -> None:
    """Start the workers of a torch `DataLoader` like those of a `DatasetLoader`, unless it has its own context."""
    loader = getattr(loader, "loader", loader)
    if isinstance(loader, DataLoader) and loader.num_workers and loader.multiprocessing_context is None:
        loader.multiprocessing_context = make_context()


def _make_process(kind: Any, workers: list[Any], *args: Any, **kwargs: Any) -> Any:
    workers.append(kind(*args, **kwargs))
    return workers[-1]


def make_context(context: Any = None, workers: list[Any] | None = None) -> Any:
    """Return a copy of a multiprocessing context in which the death of a worker cannot block this process.

    By default workers are forked from a server, see `WorkerProcess`: in a worker forked from a process with threads, a
    lock that another thread held at that moment stays locked forever.

    Torch sets an event to tell workers to end, and both sides keep checking it. A worker that is killed during a check
    keeps the lock of multiprocessing's event, and all others then wait for it forever. If a worker is killed while it
    writes a batch, multiprocessing's queue waits forever for the rest of it.

    Args:
        context: a context, the name of its start method, or None for forkserver.
        workers: a list to which each process made in the context is appended; None: no list.
    """
    methods = multiprocessing.get_all_start_methods()
    if context is None:
        context = METHOD if METHOD in methods else methods[0]
    if context in methods:
        context = multiprocessing.get_context(context)
    if isinstance(context, multiprocessing.context.BaseContext):
        original: Any = context
        context = copy.copy(original)
        vars(context)["Event"] = partial(_Event, original)
        vars(context)["Queue"] = partial(_Queue, ctx=original)
        kind = original.Process
        if original.get_start_method() == METHOD:
            kind = WorkerProcess
            start_fork_server()
        vars(context)["Process"] = kind if workers is None else partial(_make_process, kind, workers)
    return context  # torch itself refuses a value that is not a context
