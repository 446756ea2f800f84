"""Data workers that are forked from a server without threads, and the pickling of their data sets."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import types
from collections import ChainMap
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import cloudpickle
import numpy
import torch
from torch import Tensor

from runner.data.collation import is_plain
from runner.distributed.fork_server import METHOD, start_fork_server
from runner.libraries.torchvision import declare_operators, operators_are_declared

MAX_SHARED = 64
"""Number of a data set's tensors to put in shared memory, with an open file each; others are copied to each worker."""
SHARED_SIZE = 1 << 20  # bytes from which a tensor is put in shared memory


class WorkerProcess(ForkServerProcess):
    """A process that is forked from the server and gets its arguments from this process.

    Classes and functions of `__main__`, of notebooks and of function bodies are sent by value, so a script needs no
    `if __name__ == "__main__"`, and no worker runs it again. A worker starts with the environment, working directory,
    import path and output streams of its parent. It ends with its parent. It ignores Ctrl-C, and a `SystemExit` ends it
    with an error.
    """

    def start(self) -> None:
        """Fork the process.

        Raises:
            ValueError: a part of its arguments cannot be sent; the message names the part.
        """
        start_fork_server()
        if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
            # In a joblib job, the start method is one that no worker knows.
            multiprocessing.set_start_method(METHOD, force=True)
        with _empty_main():
            super().start()

    def run(self) -> None:
        """Run the target in the new process."""
        threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
        try:
            super().run()
        except SystemExit as error:
            traceback.print_exc()
            print(f"ERROR: the data set ended its worker with SystemExit({error.code!r})", file=sys.stderr, flush=True)
            os._exit(1)

    def __reduce__(self) -> Any:
        streams = [DupFd(_descriptor(stream, number)) for number, stream in ((1, sys.stdout), (2, sys.stderr))]
        sharing = torch.multiprocessing.get_sharing_strategy()
        level = logging.getLogger().level
        return _receive, (dict(os.environ), streams, sharing, level, operators_are_declared(), _pack(vars(self)))


def _receive(
    environ: dict[str, str], streams: list[Any], sharing: str, level: int, declares: bool, packed: bytes
) -> WorkerProcess:
    """Give the new process the environment, streams and settings of its parent, and return its process object."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.detach(), number)
    os.environ.clear()
    os.environ.update(environ)
    accept_signals()
    torch.multiprocessing.set_sharing_strategy(sharing)
    logging.basicConfig(level=level, format="%(levelname)s: data worker: %(message)s")
    process = WorkerProcess.__new__(WorkerProcess)
    try:
        if declares:
            declare_operators()  # otherwise a plain import of torchvision fails
        vars(process).update(pickle.loads(packed))
    except Exception as error:
        error.add_note("while a data worker received its data set, whose modules it has to import by name")
        raise
    return process


def accept_signals() -> None:
    """In a worker: ignore Ctrl-C, which its parent handles, and print the stack of all threads on SIGUSR1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def end_with_parent() -> None:
    """In a worker: wait for the parent to end, then exit."""
    # Torch's worker checks only the process that forked it, which is the server, and before it ends it waits until its
    # batches have been read.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _empty_main() -> Iterator[None]:
    """Keep multiprocessing from running this process's main program again in the new one."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _descriptor(stream: Any, number: int) -> int:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return number


class Pickler(cloudpickle.Pickler):
    """Pickles objects for a worker: also locks and queues, functions by value, and large tensors by shared memory.

    Args:
        file: the file to write to.
    """

    def __init__(self, file: Any) -> None:
        own: dict[type, Any] = {Tensor: self._reduce_tensor, numpy.memmap: _reduce_memmap}
        queues: Any = ForkingPickler(io.BytesIO()).dispatch_table
        inherited: Any = super().dispatch_table
        # Set before the constructor, which reads it.
        self.dispatch_table = ChainMap(own, queues, inherited)
        super().__init__(file)
        self._shared = 0

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if is_plain(tensor) and tensor.dtype is not torch.bfloat16 and not tensor.is_shared():
            if tensor.nbytes < SHARED_SIZE or self._shared == MAX_SHARED:
                return torch.from_numpy, (tensor.numpy(),)
            self._shared += 1
        return torch.multiprocessing.reductions.reduce_tensor(tensor)


def _reduce_memmap(array: Any) -> Any:
    """Send a mapped part of a file by its name and offset; an ordinary array would be read and copied."""
    whole: Any = array
    while isinstance(whole.base, numpy.memmap):
        whole = whole.base
    if not isinstance(whole.base, mmap.mmap) or whole.filename is None or whole.mode == "c":
        return array.__reduce__()
    first = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    mode = "r+" if whole.mode == "w+" else whole.mode
    shape = whole.offset, whole.nbytes
    return _open_memmap, (whole.filename, mode, *shape, array.dtype, array.shape, first, array.strides)


def _open_memmap(file: str, mode: Any, offset: int, size: int, dtype: Any, shape: Any, first: int, strides: Any) -> Any:
    whole = numpy.memmap(file, numpy.uint8, mode, offset, (size,))
    return numpy.ndarray(shape, dtype, whole, first, strides)


def dump(value: Any) -> bytes:
    """Return a value pickled by `Pickler`."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _pack(state: dict[str, Any]) -> bytes:
    try:
        return dump(state)
    except Exception as error:
        _, dataset, *arguments = state["_args"]  # of torch's worker loop
        is_ours = type(dataset).__name__ == "SeededBatches"
        parts = vars(dataset) if is_ours else {"dataset": dataset}
        name, culprit = blame({**parts, **{_name_of(argument): argument for argument in arguments}})
        raise ValueError(
            f"{name}={_show(culprit)}: cannot be sent to a data worker ({error}). Open files, locks, connections and "
            "generators belong to one process: make them where they are first used, in __getitem__, or leave them out "
            "in __getstate__; num_workers=0 reads in this process"
        ) from error


def _name_of(argument: Any) -> str:
    return "worker_init_fn" if isinstance(argument, functools.partial) else type(argument).__name__


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"<{type(value).__qualname__}>"


def blame(parts: dict[str, Any], path: str = "") -> tuple[str, Any]:
    """Return the name, written as in code, and the value of the innermost part that cannot be pickled.

    Args:
        parts: the values to search, by name.
        path: the name of the object that has these parts.
    """
    for name, part in parts.items():
        if _can_be_sent(part):
            continue
        whole = f"{path}{name}" if path else name
        inner = blame(_parts(part), whole) if len(whole) < 200 else ("", None)
        return inner if inner[0] else (whole, part)
    return "", None


def _can_be_sent(part: Any) -> bool:
    try:
        dump(part)
    except Exception:
        return False
    return True


def _parts(value: Any) -> dict[str, Any]:
    match value:
        case dict():
            return {f"[{key!r}]": part for key, part in value.items()}
        case list() | tuple():
            return {f"[{number}]": part for number, part in enumerate(value)}
        case functools.partial():
            named = {f".keywords[{key!r}]": part for key, part in value.keywords.items()}
            return {".func": value.func, **{f".args[{i}]": part for i, part in enumerate(value.args)}, **named}
        case types.MethodType():
            return {".__self__": value.__self__}
        case types.FunctionType():
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            used = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
            used |= {name: cell.cell_contents for name, cell in cells}
            return {f" -> {name}": part for name, part in used.items()}
    # Also the attributes of the class, which may be sent by value, with its methods.
    attributes = {**getattr(value, "__dict__", {}), **vars(type(value))}
    return {f".{name}": part for name, part in attributes.items() if not name.startswith("__") or name == "__getitem__"}
