import errno
import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from archive_server import Server, serving, tar_gz
from python_process import PATIENCE, wait_until

from runner.data import archive
from runner.data.archive import LOCK, PARTIAL, check_source, fetch_archive, find_missing

FILES = {"set/a.bin": os.urandom(300_000), "set/b.bin": b"b" * 10}
MEMBERS = [*FILES]
FETCH = f"""
import logging, runpy, signal, sys
logging.basicConfig(level="INFO", format="%(message)s")
signal.signal(signal.SIGINT, signal.default_int_handler)
module = runpy.run_path({archive.__file__!r})  # without the import of torch, which takes seconds
module["fetch_archive"](sys.argv[1], None, sys.argv[2], {MEMBERS!r})
"""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.body = tar_gz(FILES)
        yield server


def fetch(server: Server, folder: Path, md5: str | None = None, **options: Any) -> None:
    fetch_archive(server.url, md5, str(folder), MEMBERS, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder by name, apart from the lock."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != LOCK]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def start_download(server: Server, folder: Path) -> subprocess.Popen[bytes]:
    """Start a download in another process, and wait until a part of the file has arrived."""
    server.stops_after, server.hangs = 100_000, True
    command = [sys.executable, "-c", FETCH, server.url, str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: any(file.stat().st_size for file in folder.glob(f"{PARTIAL}*/*")))
    server.stops_after, server.hangs = None, False
    return process


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.wait(PATIENCE)


def test_files_are_downloaded_once(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "runner")
    folder, md5 = tmp_path / "new" / "data", hashlib.md5(server.body).hexdigest()
    for _ in range(2):
        fetch(server, folder, md5.upper())
    assert server.requests == 1
    assert contents(folder) == FILES
    assert sorted(file.name for file in folder.iterdir()) == [LOCK, "set"]
    assert caplog.messages == [f"downloading {server.url} (0.3 MB) into {folder}"]
    assert all(os.access(folder / name, os.R_OK) and (folder / name).stat().st_mode & 0o200 for name in FILES)


def test_an_existing_file_is_kept(server: Server, tmp_path: Path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "b.bin").write_bytes(b"mine")
    assert find_missing(str(tmp_path), MEMBERS) == ["set/a.bin"]
    fetch(server, tmp_path)
    assert contents(tmp_path) == FILES | {"set/b.bin": b"mine"}


def test_a_local_archive_is_unpacked(tmp_path: Path):
    (tmp_path / "archive.tar.gz").write_bytes(tar_gz(FILES))
    fetch_archive((tmp_path / "archive.tar.gz").as_uri(), None, str(tmp_path / "data"), MEMBERS)
    assert contents(tmp_path / "data") == FILES


def test_one_of_several_processes_downloads_while_the_others_wait(server: Server, tmp_path: Path):
    command = [sys.executable, "-c", FETCH, server.url, str(tmp_path)]
    server.stops_after, server.hangs = 100_000, True
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    assert server.silent.wait(PATIENCE)  # the others wait for the first, or have yet to start
    server.stops_after, server.hangs = None, False
    server.let_go.set()  # the first download fails, and another process starts its own
    results = [(process.communicate(timeout=PATIENCE)[1].decode(), process.returncode) for process in processes]
    assert sorted(code for _, code in results) == [0, 0, 0, 1]
    assert sum("broke off" in err for err, _ in results) == 1
    assert server.requests == 2 and contents(tmp_path) == FILES


def test_the_first_rank_of_a_machine_downloads(server: Server, tmp_path: Path):
    command, processes = [sys.executable, "-c", FETCH, server.url, str(tmp_path)], []
    for rank in (1, 2, 0):
        environment = os.environ | {"LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, env=environment))
        time.sleep(0.3)
    messages = [process.communicate(timeout=PATIENCE)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0] and server.requests == 1
    assert messages == ["", "", f"downloading {server.url} (0.3 MB) into {tmp_path}\n"]


def test_a_killed_download_leaves_no_file_and_no_lock(server: Server, tmp_path: Path):
    stop(start_download(server, tmp_path))
    assert list(tmp_path.glob(f"{PARTIAL}*")) and find_missing(str(tmp_path), MEMBERS) == MEMBERS
    fetch(server, tmp_path, patience=0)
    assert contents(tmp_path) == FILES and not list(tmp_path.glob(f"{PARTIAL}*"))


def test_an_interrupted_download_cleans_up(server: Server, tmp_path: Path):
    stop(start_download(server, tmp_path), signal.SIGINT)
    assert contents(tmp_path) == {} and not list(tmp_path.glob(f"{PARTIAL}*"))


def test_the_wait_for_a_process_that_makes_no_progress_is_bounded(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "runner")
    process = start_download(server, tmp_path)
    try:
        reason = r"path='.*': another process downloads there, and has made no progress for 0\.3 s"
        with pytest.raises(TimeoutError, match=reason):
            fetch(server, tmp_path, patience=0.3)
        assert caplog.messages == [f"another process downloads in {tmp_path}: waiting for it"]
    finally:
        stop(process)


def test_an_interrupted_response_leaves_no_file(server: Server, tmp_path: Path):
    server.stops_after = 100_000
    with pytest.raises(ConnectionError, match=r"url='http.*broke off \(100000 of \d+ bytes received\); try again, or"):
        fetch(server, tmp_path)
    assert contents(tmp_path) == {} and [file.name for file in tmp_path.iterdir()] == [LOCK]


def test_a_failing_or_missing_server_is_an_error(server: Server, tmp_path: Path, free_port: int):
    remedy = f"unpack it, so that {tmp_path}/set/a.bin is there"
    server.status = 404
    with pytest.raises(ConnectionError, match=f"url='{server.url}': the server answers 404 Not Found; .*{remedy}"):
        fetch(server, tmp_path)
    for url in (f"http://127.0.0.1:{free_port}/x", "http://[bad/x", f"file://{tmp_path}/none.tar.gz"):
        with pytest.raises(ConnectionError, match=f"url='{re.escape(url)}': cannot be reached .*{remedy}"):
            fetch_archive(url, None, str(tmp_path), MEMBERS)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("body", "md5", "message"),
    [
        (tar_gz(FILES), "0" * 32, "md5='000.*': the file from http.* has '[0-9a-f]{32}'; get http"),
        (b"<html>not here</html>", None, r"url='http.*': did not return a complete \.tar\.gz archive \(.*\); get http"),
        (
            tar_gz(FILES)[:-8] + b"00000000",
            None,
            r"url='http.*': did not return a complete \.tar\.gz archive \(.*\); get http",
        ),
        (tar_gz({"set/a.bin": b""}), None, "url='http.*': the archive lacks set/b.bin; get http"),
        (b"", None, r"url='http.*': did not return a complete \.tar\.gz archive"),
    ],
    ids=["checksum", "no archive", "damaged", "other files", "empty"],
)
def test_a_wrong_archive_is_refused(server: Server, tmp_path: Path, body: bytes, md5: str | None, message: str):
    server.body = body
    with pytest.raises(ValueError, match=message):
        fetch(server, tmp_path, md5)
    assert contents(tmp_path) == {} and [file.name for file in tmp_path.iterdir()] == [LOCK]


def test_only_the_contents_of_the_members_are_unpacked(server: Server, tmp_path: Path):
    inside, secret = tmp_path / "in", tmp_path / "secret"
    secret.write_bytes(b"secret")
    outside = {"../outside": b"1", str(tmp_path / "outside"): b"2", "set/../../outside": b"3", "set/c.bin": b"4"}
    server.body = tar_gz(outside | {f"./{name}": content for name, content in FILES.items()}, {"set": str(tmp_path)})
    fetch(server, inside)
    assert contents(inside) == FILES
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "secret"]
    server.body = tar_gz({"set/b.bin": b""}, {"set/a.bin": str(secret)})
    with pytest.raises(ValueError, match=r"lacks set/a\.bin"):
        fetch(server, tmp_path / "other")


def test_a_full_disk_is_an_error_that_says_where_to_make_room(server: Server, tmp_path: Path):
    program = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n{FETCH}"
    result = subprocess.run([sys.executable, "-c", program, server.url, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 1
    assert f"path='{tmp_path}': the disk is full; make room for what {server.url} holds" in result.stderr
    assert contents(tmp_path) == {} and [file.name for file in tmp_path.iterdir()] == [LOCK]


def test_a_folder_that_cannot_be_created_is_an_error(server: Server, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"path='.*file/in': cannot be written to \(Not a directory\)") as raised:
        fetch(server, tmp_path / "file" / "in")
    assert raised.value.errno is None and raised.value.__cause__.errno == errno.ENOTDIR  # type: ignore[union-attr]
    assert server.requests == 0


def test_invalid_addresses_and_checksums_are_refused():
    check_source(None, None)
    check_source("https://example.org/x.tar.gz", "0123456789abcdefABCDEF0123456789")
    for url in ("example.org/x.tar.gz", "ftp://example.org/x.tar.gz", ""):
        with pytest.raises(ValueError, match=f"url='{url}': must begin with https://, http://, file://, or be null"):
            check_source(url, None)
    for md5 in ("", "c32a", "g" * 32):
        with pytest.raises(ValueError, match=f"md5='{md5}': must have 32 hexadecimal digits, or be null"):
            check_source(None, md5)
