"""Fixtures for the tests of records."""

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # tests import `runs` from here


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, a git repository with one committed file."""
    from kept_runs import git

    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and the requests it received."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            paths.append(self.rfile.readline(1000).decode(errors="replace"))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    server.server_close()
