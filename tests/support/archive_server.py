"""A local HTTP server that serves an archive, complete or cut short, and archives to serve."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from python_process import PATIENCE


class Server(ThreadingHTTPServer):
    """Answers every request with `body`.

    Attributes:
        body: bytes.
        status: of the answer.
        stops_after: bytes after which it breaks off; None is at the end.
        hangs: whether it then says nothing until `let_go` is set, in place of closing the connection.
        requests: how many came.
        silent: set once it has broken off and sends nothing more.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body, self.status, self.requests = b"", 200, 0
        self.stops_after: int | None = None
        self.hangs = False
        self.silent, self.let_go = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        """The address of the archive."""
        return f"http://127.0.0.1:{self.server_address[1]}/archive.tar.gz"


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]  # the base is not generic

    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body[: self.server.stops_after])
        self.wfile.flush()
        if self.server.hangs:
            self.server.silent.set()
            self.server.let_go.wait(PATIENCE)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server inside the block."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.let_go.set()
            server.shutdown()
            thread.join(10)


def tar_gz(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    """An archive of files, and of symbolic links to somewhere."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o000
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
