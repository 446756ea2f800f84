"""The code that a run uses and that no commit holds: changes of tracked files, and modules that git does not know."""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

log = logging.getLogger("runner")

OURS = "runner"
"""The package of this project."""
LIMIT = 10_000_000  # bytes of modules that are kept with a run
_SHOWN = 4  # files that are listed before the rest is counted
_INSTALLED = {"site-packages", "dist-packages"}
_DOTTED = re.compile(r"[^\W\d]\w*(\.\w+)+")


def git_commit() -> str | None:
    """Return the commit that the working directory is at; None outside of a repository, or where it has none."""
    with suppress(OSError, subprocess.SubprocessError):
        return os.fsdecode(_git("rev-parse", "--verify", "--quiet", "HEAD")).strip()
    return None


def patch() -> bytes:
    """Return what `git apply` makes the working directory's repository of its commit; empty where nothing changed."""
    if git_commit() is None:
        return b""
    # Whatever the user's configuration would make of a diff, which is for people to read.
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-relative", "--src-prefix=a/", "--dst-prefix=b/")
    try:
        return _git("diff", "--binary", *plain, "HEAD")
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("git diff failed, so uncommitted changes are not kept with the run: %s", error)
        return b""


def loose_modules(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the modules that a config names, and what these import, as far as no commit holds them as they are.

    A package is kept whole where one of its files is, so that it can be imported; of this project's own, which are
    imported from where it is installed, these files alone. What is installed is not looked at. At most `LIMIT` bytes
    are kept, and what is left out is told.

    Args:
        config: of the run, whose objects have been made: what it names is imported by now.

    Returns:
        Contents by path, as under an entry of `sys.path`: `my_models.py`, `my_package/layers.py`.
    """
    kept: dict[str, bytes] = {}
    left_out: list[str] = []
    size = 0
    modules = _modules(_named(config))
    ours = _ours_not_committed() if OURS in modules else ()
    for name, file in (*_not_committed(modules), *ours):
        with suppress(OSError):
            size += file.stat().st_size
            if size > LIMIT:
                size -= file.stat().st_size
                left_out.append(str(file))
            else:
                kept[name] = file.read_bytes()
    if left_out:
        more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        log.warning(
            "no commit holds all the code of this run, and it is more than the %d MB that are kept with it: commit "
            "what is not kept: %s%s",
            LIMIT // 1_000_000,
            ", ".join(left_out[:_SHOWN]),
            more,
        )
    return kept


def _named(config: Any) -> Iterator[str]:
    """Yield the top-level modules that strings of a config name: a `_target_`, or what one is given to import."""
    if isinstance(config, Mapping | list):
        for one in config.values() if isinstance(config, Mapping) else config:
            yield from _named(one)
    elif isinstance(config, str) and _DOTTED.fullmatch(config) and (top := config.partition(".")[0]) in sys.modules:
        yield top


def _modules(names: Iterable[str]) -> dict[str, list[Path]]:
    """Return the places of modules that are not installed, and of those that their source imports, by name.

    A place is a file or a package's folder.
    """
    found: dict[str, list[Path]] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = [] if name in {*sys.stdlib_module_names, OURS} else [*_places(name)]
            waiting += [one for file in _files(found[name]) for one in _imported(file)]
    return found


def _places(name: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module that was made by hand has none
        return
    if spec is not None:
        for place in spec.submodule_search_locations or ([spec.origin] if spec.has_location else []):
            if _INSTALLED.isdisjoint(Path(str(place)).parts):
                yield Path(str(place)).absolute()


def _files(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        found = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        yield from (file for file in found if _INSTALLED.isdisjoint(file.parts))  # a .venv may lie in a folder of code


def _imported(file: Path) -> Iterator[str]:
    """Yield the top-level modules that a source file imports, wherever in it."""
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (one.name.partition(".")[0] for one in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def _not_committed(modules: Mapping[str, list[Path]]) -> Iterator[tuple[str, Path]]:
    """Yield the files to keep, each with its path below the folder from which it is imported."""
    pairs = sorted((place.parent, place) for places in modules.values() for place in places)
    for root, group in groupby(pairs, key=lambda pair: pair[0]):
        committed = _committed(root)
        for _, place in group:
            files = [*_files([place])]
            if any(file not in (committed or ()) for file in files):
                yield from ((file.relative_to(root).as_posix(), file) for file in files)


def _ours_not_committed() -> Iterator[tuple[str, Path]]:
    """Yield the modules of this project that are imported and were changed in a checkout, as `_not_committed` does."""
    home = Path(__file__).resolve().parents[2]
    if not _INSTALLED.isdisjoint(home.parts) or (committed := _committed(home)) is None:
        return  # installed, or a copy that was unpacked
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == OURS and (place := getattr(module, "__file__", None)):
            file = Path(place).resolve()  # of callbacks/, for example, to which runner/callbacks is a link
            if file not in committed:
                yield f"{name.replace('.', '/')}{'/__init__' if file.stem == '__init__' else ''}.py", file


def _committed(folder: Path) -> set[Path] | None:
    """Return the files below a folder that are as the commit has them; None where there is no repository."""
    try:
        tracked, changed = (
            {folder / os.fsdecode(one) for one in _git("-C", str(folder), *command).split(b"\0") if one}
            for command in (("ls-files", "-z"), ("diff", "--name-only", "-z", "--relative", "HEAD"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return tracked - changed


def _git(*arguments: str) -> bytes:
    """Return what git prints.

    Raises:
        OSError, subprocess.SubprocessError: git is missing, takes too long or fails, as where there is no repository.
    """
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(command, capture_output=True, timeout=10, check=True).stdout
