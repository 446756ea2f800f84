"""Listings of a server that sends without end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from runner.checkpoints.mirror import Mirror
from runner.libraries import remote_files

pytest.importorskip("aiohttp")


class Endless(BaseHTTPRequestHandler):
    """Answers with links without end."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b'<a href="ep1/">ep1</a>\n' * 1000)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/runs/one"
    server.shutdown()
    server.server_close()


def test_a_listing_without_end_is_refused(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_files, "LARGEST_LISTING", 1_000_000)
    with pytest.raises(ValueError, match="the list of files has more than 1,000,000 bytes"):
        Mirror(address).names()
