"""A cache folder of fetched shards with bounded size: the least recently used shards are evicted."""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.failures.checks import check_number
from runner.failures.errors import wrong_argument
from runner.files.lock import PATIENCE, exclusive_lock, size_of
from runner.files.whole import sync_file

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PARTIAL = re.compile(r"\w+\.[0-9a-f]{8}\.(\d+)\.partial(\.raw)?")
KEPT = ".shard"
OURS = re.compile(r"[0-9a-f]{32}\.\w+")
FACTS = (".json", ".sha256", ".lock")
"""Suffixes of a shard's metadata and lock files, which survive its eviction."""
FACTS_AGE = 30 * 86400.0  # seconds after which unused metadata and lock files are removed
MANY = 100  # above this number of files, each eviction makes room for several shards
SHARE = 16  # such an eviction frees an extra 1 / SHARE of the limit
Make = Callable[[Path, Callable[[int], None]], object]
"""`make(path, grow)` writes a file, and calls `grow(size)` before each part with the file's size after it."""


class ShardCache:
    """A folder of files that any number of processes share: one process makes each file while others wait for it.

    A file gets its name once it is complete and synced. While it is being made, room for it is reserved. A file in use
    may be evicted, but stays readable for processes that have it open.

    Args:
        folder: created if it does not exist; `~` is the home folder.
        gigabytes: maximum size of all files, in units of 10^9 bytes.

    Raises:
        ValueError: `gigabytes` is not above 0.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: str, gigabytes: float) -> None:
        check_number("cache_gb", gigabytes, "(0, inf]")
        self.folder = Path(folder).expanduser().absolute()
        self.limit = round(gigabytes * 1e9)
        self._taken_file = self.folder / "taken"
        self._argument = folder
        self._gigabytes = gigabytes
        with self._explain_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".{secrets.token_hex(4)}"
            probe.touch()
            probe.unlink()

    def get(self, name: str, size: int, make: Make, keep: Collection[str] = (), shown: str = "a shard") -> Path:
        """Return the path of a file, after making it if it is missing.

        Args:
            name: name of the file, without suffix.
            size: expected size in bytes; the file may turn out larger.
            make: writes the file to a path; temporary output at that path with `.raw` appended is removed.
            keep: names of files that must not be evicted for it.
            shown: what messages call the file.

        Raises:
            ValueError: the files in `keep`, and those that others are writing, leave no room for it.
            OSError: the disk is full, or the folder cannot be written to.
            TimeoutError: another process is making the file, without progress.
        """
        path = self.folder / f"{name}{KEPT}"

        def progress() -> int:
            return size_of(self.folder, f"{name}.*.partial*")

        with self._explain_errors():
            while not self._use(path):
                with exclusive_lock(path.with_suffix(".lock"), "fetches data", progress):
                    if not path.exists():
                        self._make(path, size, make, keep, shown)
        return path

    def has(self, name: str) -> bool:
        """Return whether a file exists, and mark it as used."""
        return self._use(self.folder / f"{name}{KEPT}")

    def discard(self, name: str) -> None:
        """Remove a file that turned out to be damaged."""
        (self.folder / f"{name}{KEPT}").unlink(missing_ok=True)

    @staticmethod
    def _use(path: Path) -> bool:
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _make(self, path: Path, size: int, make: Make, keep: Collection[str], shown: str) -> None:
        partial = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.{size}.partial")
        raw = Path(f"{partial}.raw")
        self._reserve(partial, size, 0, keep, shown)

        def grow(new_size: int) -> None:
            nonlocal size
            if new_size > size:
                self._reserve(partial, new_size, size, keep, shown)
                size = new_size

        try:
            make(partial, grow)
            raw.unlink(missing_ok=True)
            with partial.open("rb+") as file:
                sync_file(file)
            grow(partial.stat().st_size)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
            raw.unlink(missing_ok=True)

    def _reserve(self, partial: Path, size: int, before: int, keep: Collection[str], shown: str) -> None:
        """Make room for a file, and reserve the room by creating an empty file.

        `before` is the number of bytes that are already reserved for it.
        """
        kept = {f"{name}{KEPT}" for name in keep}
        waited_since = time.monotonic()
        while True:
            reserved = 0
            with exclusive_lock(self.folder / "room.lock", "makes room", lambda: 0) as is_alone:
                taken = self._read_taken() if is_alone else None
                if taken is not None:
                    taken -= before
                if taken is None or taken + size > self.limit:
                    reserved, files = self._scan(partial)
                    taken = reserved + self._evict(files, self.limit - reserved - size, kept)
                if taken + size <= self.limit:
                    partial.touch()
                    self._taken_file.write_text(str(taken + size))
                    return
            if keep or not reserved or time.monotonic() - waited_since > PATIENCE:
                reason = f"no room for {shown}, at least {size / 1e9:.3g} GB, besides those in use; raise it"
                raise wrong_argument("cache_gb", self._gigabytes, reason)
            time.sleep(0.1)  # files that others are making can be evicted once they are complete

    def _read_taken(self) -> int | None:
        """Return an upper bound on the bytes that the files take; None if it is unknown.

        Reservations are added at once, but nothing is subtracted until the folder is scanned again. So a process that
        is killed at any point leaves no number, or at worst one that is too large.
        """
        try:
            return int(self._taken_file.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _evict(self, files: list[tuple[int, int, Path]], room: int, kept: Collection[str]) -> int:
        """Remove the least recently used files until the rest fits in `room` bytes, and return the size of the rest.

        If there are many files, it removes more than necessary, so that not every new shard has to scan the folder.
        """
        taken = sum(size for _, size, _ in files)
        if taken > room and len(files) > MANY:
            room -= self.limit // SHARE
        for _, size, path in files:
            if taken <= room:
                break
            if path.name not in kept:
                path.unlink(missing_ok=True)
                taken -= size
        return taken

    def _scan(self, own: Path) -> tuple[int, list[tuple[int, int, Path]]]:
        """Return the bytes that others reserve, and (time of use, size, path) of complete files, oldest first.

        It also removes leftovers of killed processes, and metadata and locks that have long been unused.
        """
        reserved = 0
        files = []
        now = time.time()
        for path in self.folder.iterdir():
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            is_ours = OURS.fullmatch(path.name)  # never touch other files in the folder
            if is_ours and path.suffix == KEPT:
                files.append((state.st_mtime_ns, state.st_size, path))
            elif is_ours and path.suffix in FACTS and now - state.st_mtime > FACTS_AGE:
                path.unlink(missing_ok=True)
            elif (partial := PARTIAL.fullmatch(path.name)) is None or path == own:
                continue
            elif now - state.st_mtime > 2 * PATIENCE:
                path.unlink(missing_ok=True)  # left by a process that was killed
            elif partial[2] is None:
                reserved += max(int(partial[1]), state.st_size)
        return reserved, sorted(files)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Say which argument to change if the disk is full or the folder cannot be written to."""
        try:
            yield
        except OSError as error:
            if error.errno is None or isinstance(error, TimeoutError):
                raise
            reason = f"cannot be written to ({error.strerror}); choose another folder"
            if error.errno in FULL:
                reason = "the disk is full; make room there, choose another folder, or lower cache_gb"
            raise wrong_argument("cache_dir", self._argument, reason, OSError) from error
