"""A local HTTP server for a folder, which can fail, slow down, cut files off or report wrong sizes."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Server(ThreadingHTTPServer):
    """Answers HEAD and GET requests, including those for a range of bytes.

    Attributes:
        folder: the folder to serve.
        downloads: number of GET requests for each whole file, by name.
        failures: number of upcoming GET requests to answer with status 500.
        stops_after: number of bytes after which a whole file is cut off; None sends all of it.
        breaks: number of upcoming whole files to cut off; negative: all of them.
        says_more: number of bytes by which HEAD overstates the size of a file.
        says_size: whether to report sizes at all.
        delay: seconds to wait before sending a file or range.
        tags: whether to send an ETag, derived from the file's modification time.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.downloads: Counter[str] = Counter()
        self.failures, self.breaks, self.says_more, self.delay = 0, 0, 0, 0.0
        self.stops_after: int | None = None
        self.says_size, self.tags = True, True
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address of the folder."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]  # the base is not generic
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        server, name = self.server, self.path.lstrip("/")
        path = server.folder / name
        with server.lock:
            failing = with_body and server.failures > 0
            server.failures -= failing
        if failing or not path.is_file():
            self.send_response(500 if failing else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = path.read_bytes()
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span:
            first, last = int(span[1]), min(int(span[2] or len(body)), len(body) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
            body = body[first : last + 1]
        else:
            self.send_response(200)
        limit = None
        if with_body and not span:
            with server.lock:
                server.downloads[name] += 1
                if server.breaks and server.stops_after is not None:
                    server.breaks -= 1
                    limit = server.stops_after
        if server.says_size:
            self.send_header("Content-Length", str(len(body) + server.says_more * (not with_body)))
        if server.tags:
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        if not with_body:
            return
        time.sleep(server.delay)
        self.wfile.write(body[:limit])
        if limit is not None or not server.says_size:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server inside the block."""
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
