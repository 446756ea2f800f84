"""Finds the uncommitted modules that a run uses."""

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
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from runner.files.git import diff, git
from runner.records.patch import first_of

log = logging.getLogger("runner")

OURS = "runner"
"""This project's own package."""
LIMIT = 10_000_000  # bytes of modules to keep with a run
_INSTALLED = {"site-packages", "dist-packages"}
_DOTTED = re.compile(r"[^\W\d]\w*(\.\w+)+")


def loose_modules(config: Mapping[str, Any], script: Path | None = None) -> dict[str, bytes]:
    """Return the uncommitted modules that a config names, a script, and the uncommitted modules that these import.

    If a file of a package is uncommitted, the whole package is returned, so that it can be imported; for this project's
    own package, only the uncommitted files. Installed packages are skipped. At most `LIMIT` bytes are kept; a warning
    names the files left out.

    Returns:
        Contents by path relative to an entry of `sys.path`: `my_models.py`, `my_package/layers.py`.
    """
    kept: dict[str, bytes] = {}
    left_out: list[str] = []
    size = 0
    modules = _modules([*_named(config), *(_imported(script) if script is not None else ())])
    if script is not None:
        modules["__main__"] = [script]
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
        log.warning(
            "the uncommitted code of this run exceeds the %d MB that are kept with it; commit the files that are left "
            "out: %s",
            LIMIT // 1_000_000,
            first_of(left_out),
        )
    return kept


def _named(config: Any) -> Iterator[str]:
    """Yield the top-level modules named by strings in a config: targets or arguments."""
    if isinstance(config, Mapping | list):
        for value in config.values() if isinstance(config, Mapping) else config:
            yield from _named(value)
    elif isinstance(config, str) and _DOTTED.fullmatch(config) and (top := config.partition(".")[0]) in sys.modules:
        yield top


def _modules(names: Iterable[str]) -> dict[str, list[Path]]:
    """Return the locations of modules and of all modules that they import, by name, except installed packages.

    A location is a file or the folder of a package.
    """
    locations: dict[str, list[Path]] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in locations:
            locations[name] = [] if name in {*sys.stdlib_module_names, OURS} else [*_locate(name)]
            waiting += [imported for file in _files(locations[name]) for imported in _imported(file)]
    return locations


def _locate(name: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module created at run time has no spec
        return
    if spec is not None:
        for location in spec.submodule_search_locations or ([spec.origin] if spec.has_location else []):
            if _INSTALLED.isdisjoint(Path(str(location)).parts):
                yield Path(str(location)).absolute()


def _files(locations: Iterable[Path]) -> Iterator[Path]:
    for location in locations:
        files = sorted(location.rglob("*.py")) if location.is_dir() else [location]
        yield from (file for file in files if _INSTALLED.isdisjoint(file.parts))  # a folder of code may contain a .venv


def _imported(file: Path) -> Iterator[str]:
    """Yield the top-level modules that a source file imports, anywhere in the file."""
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def _not_committed(modules: Mapping[str, list[Path]]) -> Iterator[tuple[str, Path]]:
    """Yield the files to keep, each with its path relative to the folder that it is imported from."""
    pairs = sorted((location.parent, location) for locations in modules.values() for location in locations)
    for root, group in groupby(pairs, key=lambda pair: pair[0]):
        committed = _committed(root)
        for _, location in group:
            files = [*_files([location])]
            if any(str(file) not in (committed or ()) for file in files):
                yield from ((file.relative_to(root).as_posix(), file) for file in files)


def _ours_not_committed() -> Iterator[tuple[str, Path]]:
    """Yield this project's imported modules that have uncommitted changes, as `_not_committed` does."""
    home = Path(__file__).resolve().parents[2]
    if not _INSTALLED.isdisjoint(home.parts) or (committed := _committed(home)) is None:
        return  # an installed package, or an unpacked copy
    resolve = cache(os.path.realpath)  # runner/callbacks, for example, is a link to callbacks/
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == OURS and (path := getattr(module, "__file__", None)):
            folder, base = os.path.split(path)
            if (file := os.path.join(resolve(folder), base)) not in committed:
                yield f"{name.replace('.', '/')}{'/__init__' if base == '__init__.py' else ''}.py", Path(file)


def _committed(folder: Path) -> set[str] | None:
    """Return the source files in a folder that are unchanged since the commit; None without a repository."""
    sources = ("--", "*.py")
    try:
        changes = diff("--name-only", "-z", "--relative", "HEAD", *sources, folder=folder)
        listed = git("ls-files", "-z", *sources, folder=folder), changes
    except (OSError, subprocess.SubprocessError):
        return None
    tracked, changed = (
        {os.path.join(folder, os.fsdecode(path)) for path in names.split(b"\0") if path} for names in listed
    )
    return tracked - changed
