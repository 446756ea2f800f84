"""A local HTTP server that sends an archive, complete or cut short, and a function that makes archives to send."""

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
        body: the bytes to send.
        status: HTTP status of each answer.
        stops_after: number of bytes to send before stopping; None sends all of them.
        hangs: whether the connection then stays open, without another byte, until `let_go` is set.
        requests: number of requests so far.
        silent: set once a connection that hangs has sent its last byte.
        let_go: set by a test to close the connections that hang.
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
    """Return a gzipped tar archive of files, none of which has any permission, and of symbolic links to targets."""
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
