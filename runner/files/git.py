"""Calls git so that no repository can make it run a program or contact a server.

With hooks, filters, file system monitors and remotes off, repositories of other owners, common in containers, are safe
to read, so `safe.directory` allows all of them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

PATIENCE = 10.0  # seconds that a command may take
DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative", "--submodule=short")
"""Shows changes in one form, whatever the user's settings; a submodule is compared by its checked-out commit."""
_CLEAN = ("--ignore-submodules=dirty",)  # otherwise git starts a second git in each submodule, with its filters on
_OFF = {
    "safe.directory": "*",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "log.showSignature": "false",
    "submodule.recurse": "false",
}
_NO_SERVERS = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


def git(*arguments: str, folder: str | Path = ".", stdin: bytes = b"") -> bytes:
    """Run git in a folder and return its output.

    Raises:
        OSError, subprocess.SubprocessError: git is missing, takes too long, or fails, for example without a repository.
    """
    return _run(arguments, folder, _settings(str(Path(folder).absolute())), stdin)


def diff(*options: str, folder: str | Path = ".") -> bytes:
    """Return the changes of a working tree since its commit; raises as `git` does."""
    return git(*DIFF, *_CLEAN, *options, folder=folder)


def filters(folder: str | Path = ".") -> list[str]:
    """Return the names of the configured filters, such as `lfs`; none of them is run here."""
    try:
        keys = _run(("config", "--name-only", "-z", "--get-regexp", r"^filter\."), folder, _OFF)
    except subprocess.CalledProcessError:  # none
        return []
    return sorted({key.partition(".")[2].rpartition(".")[0] for key in os.fsdecode(keys).split("\0") if key})


def root_of(folder: str | Path = ".") -> Path:
    """Return the top folder of a working tree; raises as `git` does."""
    return Path(os.fsdecode(git("rev-parse", "--show-toplevel", folder=folder)).removesuffix("\n"))


def submodules(root: Path) -> Iterator[Path]:
    """Yield the folders of all checked-out submodules of a working tree, nested ones included."""
    for line in git("ls-files", "--stage", "-z", folder=root).split(b"\0"):
        facts, _, name = line.partition(b"\t")
        if facts.startswith(b"160000 ") and (folder := root / os.fsdecode(name)).joinpath(".git").exists():
            yield folder
            yield from submodules(folder)


@lru_cache
def _settings(folder: str) -> dict[str, str]:
    """Return settings that turn off whatever runs programs in the repository of a folder."""
    off = {"clean": "", "smudge": "", "process": "", "required": "false"}
    return {**_OFF, **{f"filter.{name}.{key}": value for name in filters(folder) for key, value in off.items()}}


def _run(arguments: tuple[str, ...], folder: str | Path, settings: dict[str, str], stdin: bytes = b"") -> bytes:
    known = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    environment = {**os.environ, **_NO_SERVERS, "GIT_CONFIG_COUNT": f"{known + len(settings)}"}
    environment.pop("GIT_EXTERNAL_DIFF", None)
    for number, (key, value) in enumerate(settings.items(), known):  # not `-c key=value`: keys may contain "="
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    command = ["git", "--no-optional-locks", "--no-pager", "-C", str(folder), *arguments]
    completed = subprocess.run(command, input=stdin, capture_output=True, timeout=PATIENCE, check=True, env=environment)
    return completed.stdout
