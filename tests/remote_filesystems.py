"""File systems in memory that fail, hang and lie on purpose, under the protocol `faulty`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from python_process import PATIENCE


class Faulty(MemoryFileSystem):
    """A file system whose uploads do what `fault` does first: raise, wait, or return other content to store.

    Attributes:
        store: its files, apart from those of `memory://`.
        fault: called with the path and the content of each file that is uploaded.
        uploads: how many files were uploaded, or tried to be.
    """

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012  (as the base has it)
    pseudo_dirs = [""]  # noqa: RUF012
    fault: Callable[[str, bytes], bytes] = staticmethod(lambda path, content: content)
    uploads = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        path = str(path).removeprefix("faulty://")
        return "/" + path.strip("/") if path.strip("/") else ""

    def put_file(self, lpath: Any, rpath: Any, **_: Any) -> None:
        type(self).uploads += 1
        with open(lpath, "rb") as file:
            content = file.read()
        self.pipe_file(rpath, type(self).fault(rpath, content))


@contextmanager
def faulty() -> Iterator[type[Faulty]]:
    """A new, empty file system at `faulty://`, sound until its `fault` is set."""
    kind = type("Faulty", (Faulty,), {"store": {}, "pseudo_dirs": [""], "uploads": 0})
    fsspec.register_implementation("faulty", kind, clobber=True)
    yield kind


class Gate:
    """A fault that hangs until it is opened.

    Attributes:
        reached: set once an upload hangs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, path: str, content: bytes) -> bytes:
        if path.endswith(self.name):
            self.reached.set()
            self.open.wait(PATIENCE)
        return content


def files(kind: type[Faulty]) -> dict[str, bytes]:
    """All files of a file system, by path."""
    remote = fsspec.filesystem("faulty")
    return {path: remote.cat_file(path) for path in remote.find("")}
