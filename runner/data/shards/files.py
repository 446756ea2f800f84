"""Find and read shards: local files, or addresses that fsspec supports, such as s3://, gs:// and https://."""

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
from runner.files.addresses import without_credentials, without_credentials_of
from runner.libraries.remote_files import check_address, http_options

log = logging.getLogger("runner")

RETRY_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before each further attempt
SILENCE = 30  # seconds to wait for a server that sends nothing
AT_ONCE = 8  # files that are looked up or read at the same time
LASTING = (401, 403, 404, 410)  # HTTP statuses that are not worth a retry
TAGS = ("ETag", "etag", "md5Hash", "crc32c", "Content-MD5", "LastModified", "Last-Modified", "mtime", "created")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
Result = TypeVar("Result")


class ShardFile(NamedTuple):
    """A shard, as it was at the start of the run.

    Attributes:
        address: a local path, or an address with a protocol.
        size: size of the file in bytes.
        tag: the server's version tag, or the modification time of the file; empty if the server gives neither.
    """

    address: str
    size: int
    tag: str

    @property
    def is_local(self) -> bool:
        """Whether the file is on this machine."""
        return "://" not in self.address

    @property
    def shown(self) -> str:
        """The address for messages, without credentials."""
        return repr(without_credentials(self.address))

    def check(self) -> None:
        """Raise ValueError if the file has changed since the run began."""
        if (now := _look_up(self.address)) != self:
            raise ValueError(
                f"{self.shown} has changed since this run began ({self.size} bytes {self.tag} -> {now.size} bytes "
                f"{now.tag}): samples would no longer be the same; restore it, or start a new run"
            )

    def download(self, target: Path) -> None:
        """Copy the whole file to a local path.

        Raises:
            ConnectionError: the server fails or disconnects in every attempt.
            ValueError: the file has changed.
        """

        def fetch() -> None:
            _filesystem(self.address).get_file(self.address, str(target))
            if (received := target.stat().st_size) != self.size:
                self.check()
                raise ConnectionError(f"{received} of {self.size} bytes received")

        with_retries(self.address, fetch)
        self.check()

    def open(self) -> Any:
        """Return the file, open for reading in binary mode."""
        return open(self.address, "rb") if self.is_local else _filesystem(self.address).open(self.address, "rb")


def find_shards(path: str | Sequence[str], suffixes: Sequence[str], key: str = "path") -> list[ShardFile]:
    """Return the files that an argument names, sorted by address.

    Args:
        path: a file, a folder, a pattern with `*`, or a range as in `train-{000..127}.tar`, local or remote; or a list
            of them.
        suffixes: suffixes of the files to take from a folder.
        key: the name of the argument, for messages.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the library for the protocol of an address is not installed.
        ConnectionError: a server fails in every attempt.
        ValueError: a server does not report the size of a file.
    """
    patterns = [path] if isinstance(path, str) else [*path]
    names = [name for pattern in patterns for name in _expand(os.path.expanduser(pattern.removeprefix("file://")))]
    addresses = {address for name in names for address in _find(name, suffixes, key)}
    if not addresses:
        raise FileNotFoundError(
            f"{key}={without_credentials(str(path))!r}: no shards found; give files that end with "
            f"{' or '.join(suffixes)}, a folder of them, or a pattern"
        )
    return in_parallel(_look_up, sorted(addresses))


def in_parallel(work: Callable[[Any], Result], items: Iterable[Any]) -> list[Result]:
    """Return `work(item)` for each item, in order; several threads do the work."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*pool.map(work, items)]


def with_retries(address: str, work: Callable[[], Result]) -> Result:
    """Return the result of `work()`, with up to four retries if a server fails.

    Raises:
        ConnectionError: every attempt failed.
        FileNotFoundError: the server has no such file.
        ValueError: raised by `work`, without a retry.
    """
    for wait in (*RETRY_WAITS, None):
        try:
            return work()
        except (ValueError, ModuleNotFoundError):
            raise
        except Exception as error:  # aiohttp, botocore, fsspec and the system raise different types
            shown = without_credentials(address)
            statuses = (getattr(exception, "status", None) for exception in (error, error.__cause__))
            status = next(filter(None, statuses), None)
            if status == 404 or (isinstance(error, FileNotFoundError) and error.__cause__ is None):
                raise FileNotFoundError(f"{shown!r}: there is no such file") from error
            text = str(error.__cause__ or error) or type(error).__name__
            reason = " ".join(without_credentials_of(address, text).split())
            if wait is None or status in LASTING:
                raise ConnectionError(
                    f"{shown!r}: cannot be read: {reason}; check the address and its server"
                ) from error
            log.warning("%s: %s; trying again in %g s", shown, reason, wait)
            time.sleep(wait)
    raise AssertionError


def _expand(name: str) -> list[str]:
    """Return all names that a name with ranges of numbers, such as `{000..127}`, expands to."""
    match = RANGE.search(name)
    if match is None:
        return [name]
    first, last = match.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [full for number in numbers for full in _expand(name[: match.start()] + number + name[match.end() :])]


def _find(name: str, suffixes: Sequence[str], key: str) -> list[str]:
    if "://" not in name:
        paths = glob.glob(name, recursive=True)
        if os.path.isdir(name):
            paths = [
                str(path)
                for path in Path(name).rglob("*")
                if path.suffix in suffixes and not is_hidden(str(path.relative_to(name)))
            ]
        return [os.path.abspath(path) for path in paths if os.path.isfile(path)]
    check_address(key, name)
    filesystem = _filesystem(name)
    if "*" in name:
        return [filesystem.unstrip_protocol(path) for path in with_retries(name, lambda: filesystem.glob(name))]
    if name.endswith(tuple(suffixes)):
        return [name]
    paths = with_retries(name, lambda: filesystem.find(name))
    shards = [path for path in paths if path.endswith(tuple(suffixes)) and not is_hidden(path.rpartition("/")[2])]
    return [filesystem.unstrip_protocol(path) for path in shards]


def _look_up(address: str) -> ShardFile:
    if "://" not in address:
        try:
            state = os.stat(address)
        except FileNotFoundError:
            raise FileNotFoundError(f"{address!r}: there is no such file") from None
        return ShardFile(address, state.st_size, str(state.st_mtime_ns))
    info = with_retries(address, lambda: _filesystem(address).info(address))
    if info.get("size") is None:
        raise ValueError(
            f"{without_credentials(address)!r}: the server does not report the size of the file, so a truncated "
            "download could not be detected; use another server"
        )
    return ShardFile(address, info["size"], next((str(info[name]) for name in TAGS if info.get(name)), ""))


def _filesystem(address: str) -> Any:
    """Return fsspec's file system for an address, without cached listings."""
    protocol = address.partition("://")[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("http", "https"):
        timeout = importlib.import_module("aiohttp").ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
        # A compressed response would differ in size from the file.
        options |= http_options(timeout=timeout, headers={"Accept-Encoding": "identity"})
    return importlib.import_module("fsspec").filesystem(protocol, **options)
