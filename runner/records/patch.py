"""Records uncommitted changes to tracked files as a patch, and large files by their digest."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runner.files.git import diff, filters, git, root_of, submodules

log = logging.getLogger("runner")

LARGE = 2_000_000  # bytes; files that are larger, before or after their change, are left out
TOTAL = 10_000_000  # bytes of all files in the patch
DIGESTED = 256_000_000  # bytes to read for digests, which takes up to half a second
SHOWN = 4  # files to list; the others are counted


class _Change(NamedTuple):
    """A tracked file that may have changed.

    Attributes:
        path: relative to the top of its working tree.
        blob: git's digest of the committed content; zeros for a new file.
        size: in bytes, of the committed content or of the file, whichever is larger.
    """

    path: str
    blob: str
    size: int


def git_commit() -> str | None:
    """Return the commit of the working directory; None without a repository or without commits."""
    with suppress(OSError, subprocess.SubprocessError):
        return _commit()
    return None


def _commit() -> str:
    return os.fsdecode(git("rev-parse", "--verify", "--quiet", "HEAD")).strip()


def patch() -> bytes:
    """Return a patch from the commit to the current working tree, for `git apply`; empty if nothing has changed.

    It includes changes inside submodules. Large files, and files beyond a total size, get only a line at the top with
    their size and digest. Warns about everything that cannot be recorded.
    """
    try:
        _commit()
        root = root_of()
        parts = [_patch(folder, root) for folder in (root, *submodules(root))]
    except (OSError, subprocess.SubprocessError) as error:
        here = Path.cwd()
        has_no_commit = isinstance(error, subprocess.CalledProcessError) and error.returncode == 1
        if not has_no_commit and any((folder / ".git").exists() for folder in (here, *here.parents)):
            reason = os.fsdecode(getattr(error, "stderr", None) or b"").partition("\n")[0] or error
            log.warning("git failed, so the commit or uncommitted changes are not recorded: %s", reason)
        return b""
    large = [file for files, _ in parts for file in files]
    if large:
        log.warning("git.patch has only the size and digest of large files that have changed: %s", first_of(large))
    return b"".join([*(f"# not recorded: {file}\n".encode() for file in large), *(changes for _, changes in parts)])


def first_of(names: Sequence[str]) -> str:
    """Return the first few names as text, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _patch(folder: Path, root: Path) -> tuple[list[str], bytes]:
    """Return the large files of a working tree that have changed, and a patch with the changes of other files.

    Paths are relative to the root.
    """
    inside = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    changes = [*_changes(folder)]
    filtered: set[str] = set()
    if changes and (names := filters(folder)):  # filters are off here, so filtered files look changed
        text = "\0".join(change.path for change in changes)
        facts = os.fsdecode(git("check-attr", "-z", "--stdin", "filter", folder=folder, stdin=os.fsencode(text)))
        fields = facts.split("\0")
        filtered = {path for path, name in zip(fields[0::3], fields[2::3], strict=False) if name in names}
    if filtered:
        shown = first_of([f"{inside}{path}" for path in sorted(filtered)])
        log.warning("git's filters are not run, so changes to these files are not recorded: %s", shown)
    room = TOTAL
    large: list[_Change] = []
    for change in sorted(changes, key=lambda change: change.size):
        if change.path in filtered:
            continue
        room -= change.size
        if change.size > LARGE or room < 0:
            large.append(change)
    left_out = sorted(filtered | {change.path for change in large})
    paths = (".", *(f":(exclude,top,literal){path}" for path in left_out))
    prefixes = (f"--src-prefix=a/{inside}", f"--dst-prefix=b/{inside}")
    described = [*_describe(folder, inside, large)]
    return described, diff("--binary", *prefixes, "HEAD", "--", *paths, folder=folder)


def _changes(folder: Path) -> Iterator[_Change]:
    """Yield tracked files that may have changed, by their size and time: no content is read."""
    fields = git("diff-index", "-z", "--ignore-submodules=dirty", "HEAD", folder=folder).split(b"\0")
    rows = [(facts.split(b" ")[2], os.fsdecode(path)) for facts, path in zip(fields[0::2], fields[1::2], strict=False)]
    text = b"".join(blob + b"\n" for blob, _ in rows)
    sizes = git("cat-file", "--batch-check=%(objectsize)", folder=folder, stdin=text).splitlines() if rows else []
    for (blob, path), size in zip(rows, sizes, strict=True):
        committed = int(size) if size.isdigit() else 0  # new files and commits of submodules have no size
        yield _Change(path, blob.decode(), max(committed, _size_of(folder / path) or 0))


def _describe(folder: Path, inside: str, changes: Sequence[_Change]) -> Iterator[str]:
    """Yield the path, size and digest of each file whose content differs from the committed one."""
    room = DIGESTED
    for change in changes:
        path = folder / change.path
        shown = json.dumps(f"{inside}{change.path}")
        size = _size_of(path)
        if size is None:
            yield f"{shown}, which is gone"
        elif (room := room - size) < 0:
            yield f"{shown}, {size} bytes, modified at {path.lstat().st_mtime_ns} ns"
        elif (blob := _blob_of(path, size, len(change.blob))) != change.blob:
            yield f"{shown}, {size} bytes, blob {blob}"


def _size_of(path: Path) -> int | None:
    """Return the size of a file in bytes: None without a file, 0 for links and folders."""
    try:
        state = path.lstat()
    except OSError:
        return None
    return state.st_size if stat.S_ISREG(state.st_mode) else 0


def _blob_of(path: Path, size: int, length: int) -> str:
    """Return git's digest of a file's content in `length` hexadecimal digits: 40 for SHA-1, 64 for SHA-256."""
    digest = hashlib.sha1(usedforsecurity=False) if length == 40 else hashlib.sha256()
    digest.update(f"blob {size}\0".encode())
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
