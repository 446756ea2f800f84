"""Download an archive of data files once, check it, and unpack the files that are needed."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import logging
import os
import posixpath
import re
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.files.lock import PATIENCE, exclusive_lock, size_of
from runner.files.tar import PlainTarInfo
from runner.files.whole import sync_file

log = logging.getLogger("runner")

SCHEMES = ("https://", "http://", "file://")
LOCK = ".download.lock"  # empty file in the folder, locked while a process downloads
PARTIAL = ".download-"  # prefix of folders whose files are not complete yet
CHUNK = 1 << 20  # maximum bytes per read
ANSWER_TIME = 30  # seconds that a server may stay silent
HEAD_START = 5  # seconds by which the first rank of a machine may start earlier, as only its messages are shown
BROKEN = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_source(url: str | None, md5: str | None) -> None:
    """Raise an error if an address or a checksum cannot be used; None is allowed for both.

    Raises:
        ValueError: the address does not begin with https://, http:// or file://, or the checksum does not have 32
            hexadecimal digits.
    """
    if url is not None and not url.startswith(SCHEMES):
        raise wrong_argument("url", url, f"must begin with {', '.join(SCHEMES)}, or be null to never download")
    if md5 is not None and not re.fullmatch("[0-9a-fA-F]{32}", md5):
        raise wrong_argument("md5", md5, "must have 32 hexadecimal digits, or be null to skip the check")


def find_missing(path: str, members: Sequence[str]) -> list[str]:
    """Return the files, by their paths inside the folder, that are missing."""
    return [member for member in members if not Path(path, member).is_file()]


def fetch_archive(url: str, md5: str | None, path: str, members: Sequence[str], patience: float = PATIENCE) -> None:
    """Download a `.tar.gz` and put files from it into a folder, if any of them is missing there.

    Any number of processes may call this for the same folder, such as all ranks of a run or all jobs of a sweep: one of
    them downloads, and the others wait for it. A file gets its final name once it is complete, checked and synced to
    disk; existing files are kept. Only the contents of the `members` are taken from the archive, never its names, links
    or permissions.

    Args:
        url: address of the archive.
        md5: checksum of the archive, 32 hexadecimal digits; None skips the check.
        path: the folder, created if it does not exist.
        members: paths of the needed files, the same in the archive and in the folder.
        patience: seconds to wait for another process that makes no progress.

    Raises:
        ConnectionError: the server cannot be reached, refuses the request, or stops before the end.
        ValueError: the checksum differs, the archive is damaged, or it lacks a needed file.
        TimeoutError: another process makes no progress.
        OSError: the disk is full, or the folder cannot be written to.
    """
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if not is_first:
        _give_head_start(path, members)
    if not find_missing(path, members):
        return
    by_hand = f"get {url} by other means and unpack it, so that {Path(path, members[0])} is there"
    with _explain_errors(url, path, by_hand):
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder / LOCK, "downloads", lambda: size_of(folder, f"{PARTIAL}*/*"), patience) as is_alone:
            if is_alone:
                for leftover in folder.glob(f"{PARTIAL}*/"):  # of processes that were killed
                    shutil.rmtree(leftover, ignore_errors=True)
            if not is_first:  # if the first rank has failed, this one is about to be ended
                _give_head_start(path, members)
            if find_missing(path, members):  # still
                _fetch(url, md5, folder, members, by_hand)


def _fetch(url: str, md5: str | None, folder: Path, members: Sequence[str], by_hand: str) -> None:
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as name:
        scratch = Path(name)
        archive = scratch / "archive"
        checksum = _download(url, archive, folder, by_hand)
        differs = md5 is not None and checksum != md5.lower()
        refuse_if(differs, "md5", md5, f"the file from {url} has {checksum!r}; {by_hand}")
        try:
            files = _unpack(archive, scratch, members)
        except BROKEN as error:
            raise wrong_argument(
                "url", url, f"did not return a complete .tar.gz archive ({error}); {by_hand}"
            ) from error
        if absent := [member for member in members if member not in files]:
            raise wrong_argument("url", url, f"the archive lacks {absent[0]}; {by_hand}")
        for member in find_missing(str(folder), members):
            (folder / member).parent.mkdir(parents=True, exist_ok=True)
            files[member].replace(folder / member)


def _download(url: str, target: Path, folder: Path, by_hand: str) -> str:
    """Download an address into the file `target` and return the MD5 checksum of its content."""
    digest = hashlib.md5(usedforsecurity=False)
    received = 0
    with _open(url, by_hand) as answer, target.open("wb") as file:
        expected = int(answer.headers.get("Content-Length") or 0)
        size = f"{expected / 1e6:.3g} MB" if expected else "of unknown size"
        log.info("downloading %s (%s) into %s", url, size, folder)
        while chunk := _read(url, answer, by_hand):
            file.write(chunk)
            file.flush()  # lets waiting processes see progress
            digest.update(chunk)
            received += len(chunk)
    if expected and received != expected:
        reason = f"{received} of {expected} bytes received"
        raise ConnectionError(f"url={url!r}: the download broke off ({reason}); try again, or {by_hand}")
    return digest.hexdigest()


def _open(url: str, by_hand: str) -> Any:
    """Return the open response of a server; raise any failure as a ConnectionError."""
    try:
        return urllib.request.urlopen(url, timeout=ANSWER_TIME)
    except urllib.error.HTTPError as error:
        error.close()
        raise ConnectionError(f"url={url!r}: the server answers {error.code} {error.reason}; {by_hand}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"url={url!r}: cannot be reached ({reason}); {by_hand}") from error


def _read(url: str, answer: Any, by_hand: str) -> bytes:
    """Return the next bytes, b'' at the end; raise any failure as a ConnectionError."""
    try:
        return answer.read1(CHUNK)  # whatever has arrived, even if it is little
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"url={url!r}: the download broke off ({error}); try again, or {by_hand}") from error


def _unpack(archive: Path, scratch: Path, members: Sequence[str]) -> dict[str, Path]:
    """Unpack the members that are in the archive to files named by us, and return these files by member."""
    files: dict[str, Path] = {}
    with gzip.open(archive) as plain, tarfile.open(fileobj=plain, mode="r:", tarinfo=PlainTarInfo) as tar:
        for entry in tar:
            member = posixpath.normpath(entry.name)
            source = tar.extractfile(entry) if member in members and entry.isreg() and not entry.issparse() else None
            if source is None:
                continue
            files[member] = scratch / str(members.index(member))
            with source, files[member].open("wb") as file:
                shutil.copyfileobj(source, file, CHUNK)
                sync_file(file)  # so that even after a power failure, no file with its final name is incomplete
        while plain.read(CHUNK):  # to the end, where gzip checks its checksum
            pass
    return files


@contextmanager
def _explain_errors(url: str, path: str, by_hand: str) -> Iterator[None]:
    """Explain a full disk or an unwritable folder in one sentence; do not change errors that are already explained."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"path={path!r}: {error.strerror}; end it, and start again") from error
        if error.errno in FULL:
            message = f"path={path!r}: the disk is full; make room for what {url} holds, or choose another path"
        else:
            message = f"path={path!r}: cannot be written to ({error.strerror}); choose another path, or {by_hand}"
        raise OSError(message) from error


def _give_head_start(path: str, members: Sequence[str]) -> None:
    until = time.monotonic() + HEAD_START
    while find_missing(path, members) and time.monotonic() < until:
        time.sleep(0.1)
