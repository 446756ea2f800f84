"""Locations of shards: on this machine, or at an address that fsspec supports, such as s3://, gs:// and https://."""

from __future__ import annotations

import glob
import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from runner.data.images.decoding import is_hidden
from runner.files.addresses import without_credentials, without_those_of
from runner.libraries.remote_files import check_address, http_options

log = logging.getLogger("runner")

RETRY_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before each further attempt
SILENCE = 30  # seconds that a server may say nothing
AT_ONCE = 8  # files that are asked for, or read, at the same time
LASTING = (401, 403, 404, 410)  # answers of a server that another attempt does not change
TAGS = ("ETag", "etag", "md5Hash", "crc32c", "Content-MD5", "LastModified", "Last-Modified", "mtime", "created")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
Result = TypeVar("Result")


class ShardFile(NamedTuple):
    """A file as it was when the run began.

    Attributes:
        address: a path of this machine, or an address with a protocol.
        size: size of the file in bytes.
        tag: the server's version tag or modification time of the file; empty if there is none.
    """

    address: str
    size: int
    tag: str

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine."""
        return "://" not in self.address

    @property
    def shown(self) -> str:
        """Its address for messages, without credentials."""
        return repr(without_credentials(self.address))

    def check(self) -> None:
        """Raise ValueError if the file is not the one that it was when the run began."""
        if (now := _look(self.address)) != self:
            raise ValueError(
                f"{self.shown} has changed since this run began ({self.size} bytes {self.tag} -> {now.size} bytes "
                f"{now.tag}): samples would no longer be the same; restore it, or start a new run"
            )

    def download(self, target: Path) -> None:
        """Write a copy of the file to a path of this machine, all of it.

        Raises:
            ConnectionError: the server fails or disconnects in every attempt.
            ValueError: the file has changed.
        """

        def fetch() -> None:
            _filesystem(self.address).get_file(self.address, str(target))
            if (received := target.stat().st_size) != self.size:
                self.check()
                raise ConnectionError(f"{received} of {self.size} bytes received")

        retried(self.address, fetch)
        self.check()

    def open(self) -> Any:
        """Return the file, open for reading in binary mode."""
        return open(self.address, "rb") if self.is_local else _filesystem(self.address).open(self.address, "rb")


def find_shards(path: str | Sequence[str], suffixes: Sequence[str], key: str = "path") -> list[ShardFile]:
    """Return the files that an argument names, in the order of their addresses.

    Args:
        path: a file, a folder, a pattern with `*`, or numbers as in `train-{000..127}.tar`, here or at an address; or a
            list of them.
        suffixes: the names of files in a folder end with one of them.
        key: the name of the argument.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the library for the protocol of an address is not installed.
        ConnectionError: a server fails in every attempt.
        ValueError: a server does not say how large a file is.
    """
    given = [path] if isinstance(path, str) else [*path]
    named = [one for name in given for one in _expand(os.path.expanduser(name.removeprefix("file://")))]
    found = [file for one in named for file in _find(one, suffixes, key)]
    if not found:
        raise FileNotFoundError(
            f"{key}={without_credentials(str(path))!r}: no shards found; give files that end with "
            f"{' or '.join(suffixes)}, a folder of them, or a pattern"
        )
    return in_parallel(_look, sorted({*found}))


def in_parallel(work: Callable[[Any], Result], items: Iterable[Any]) -> list[Result]:
    """Return `work(item)` of each item, several at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*pool.map(work, items)]


def retried(address: str, work: Callable[[], Result]) -> Result:
    """Return the result of `work()`, retrying a bounded number of times if a server fails.

    Raises:
        ConnectionError: it failed each time.
        FileNotFoundError: the server has no such file.
        ValueError: raised by `work`, without a retry.
    """
    for wait in (*RETRY_WAITS, None):
        try:
            return work()
        except (ValueError, ModuleNotFoundError):
            raise
        except Exception as error:  # of many kinds: aiohttp's, botocore's, fsspec's, the system's
            shown = without_credentials(address)
            status = next((one for link in (error, error.__cause__) if (one := getattr(link, "status", None))), None)
            if status == 404 or (isinstance(error, FileNotFoundError) and error.__cause__ is None):
                raise FileNotFoundError(f"{shown!r}: there is no such file") from error
            reason = " ".join(without_those_of(address, str(error.__cause__ or error) or type(error).__name__).split())
            if wait is None or status in LASTING:
                raise ConnectionError(
                    f"{shown!r}: cannot be read: {reason}; check the address and its server"
                ) from error
            log.warning("%s: %s; trying again in %g s", shown, reason, wait)
            time.sleep(wait)
    raise AssertionError


def _expand(name: str) -> list[str]:
    """Return the names that a name with a range of numbers, `{000..127}`, stands for."""
    found = RANGE.search(name)
    if found is None:
        return [name]
    first, last = found.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [one for number in numbers for one in _expand(name[: found.start()] + number + name[found.end() :])]


def _find(name: str, suffixes: Sequence[str], key: str) -> list[str]:
    if "://" not in name:
        found = glob.glob(name, recursive=True)
        if os.path.isdir(name):
            found = [
                str(one)
                for one in Path(name).rglob("*")
                if one.suffix in suffixes and not is_hidden(str(one.relative_to(name)))
            ]
        return [os.path.abspath(one) for one in found if os.path.isfile(one)]
    check_address(key, name)
    files = _filesystem(name)
    if "*" in name:
        return [files.unstrip_protocol(one) for one in retried(name, lambda: files.glob(name))]
    if name.endswith(tuple(suffixes)):
        return [name]
    listed = retried(name, lambda: files.find(name))
    seen = [one for one in listed if one.endswith(tuple(suffixes)) and not is_hidden(one.rpartition("/")[2])]
    return [files.unstrip_protocol(one) for one in seen]


def _look(address: str) -> ShardFile:
    if "://" not in address:
        try:
            state = os.stat(address)
        except FileNotFoundError:
            raise FileNotFoundError(f"{address!r}: there is no such file") from None
        return ShardFile(address, state.st_size, str(state.st_mtime_ns))
    info = retried(address, lambda: _filesystem(address).info(address))
    if info.get("size") is None:
        raise ValueError(
            f"{without_credentials(address)!r}: the server does not report the size of the file, so a truncated "
            "download could not be detected; use another server"
        )
    return ShardFile(address, info["size"], next((str(info[one]) for one in TAGS if info.get(one)), ""))


def _filesystem(address: str) -> Any:
    """Return fsspec's file system for an address, without cached listings."""
    protocol = address.partition("://")[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("http", "https"):
        timeout = importlib.import_module("aiohttp").ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
        # A compressed answer would be of another size than the file.
        options |= http_options(timeout=timeout, headers={"Accept-Encoding": "identity"})
    return importlib.import_module("fsspec").filesystem(protocol, **options)
