"""Writes and reads the uncommitted modules kept with a run, and imports them for a rerun."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.files.names import CODE
from runner.records.uncommitted import OURS
from runner.terminal.console import show_path
from runner.terminal.text import print_to_stderr

_copies: list[TemporaryDirectory[str]] = []
"""Temporary copies to import modules from; removed when this process ends."""


def write_code(run_dir: Path, modules: Mapping[str, bytes]) -> list[Path]:
    """Replace the modules kept in a run's folder, and return their files."""
    partial = run_dir / f".{CODE}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    _write(partial, modules)
    shutil.rmtree(run_dir / CODE, ignore_errors=True)
    if modules:
        os.replace(partial, run_dir / CODE)
    return [run_dir / CODE / name for name in modules]


def read_code(run_dir: Path) -> dict[str, bytes]:
    """Return the modules kept in a run's folder, by relative path; a link has its target as content."""
    folder = run_dir / CODE
    paths = [folder] if folder.is_symlink() else sorted(folder.rglob("*"))
    return {
        path.relative_to(folder).as_posix(): os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in paths
        if (path.is_symlink() or path.is_file()) and "__pycache__" not in path.parts
    }


def code_to_import(run_dir: Path, again: bool, may_run: bool) -> dict[str, str]:
    """Return the kept modules to import if any has changed or is not found here, and print their names.

    Args:
        run_dir: the folder with the run's record.
        again: whether this is a rerun; a resumed run uses the current modules wherever they are found.
        may_run: whether this user made the record, or has allowed its modules.

    Returns:
        The contents to pass to `import_from`; empty to import nothing.
    """
    code = _as_text(read_code(run_dir))
    changed = {*_changed(code)}
    ours = {name for name in code if name.partition("/")[0] == OURS}
    missing = {name for name in changed - ours if find_spec(_top(name)) is None}
    needed = changed - ours if again else missing
    used = needed if may_run else set()
    source = show_path(run_dir / CODE)
    if needed and not may_run:
        source += "; read it, and add --allow-code if you trust it"
    for names, reason in ((changed - missing, "changed since the run was made"), (missing, "not found here")):
        for shown, use in ((names & used, "is used"), (names - used, "is not used")):
            if shown:
                print_to_stderr(f"INFO: {', '.join(sorted(shown))}: {reason}; the recorded version {use}: {source}")
    imported = {*code} - ours if again and used else used
    return {name: content for name, content in code.items() if name in imported}


def _top(name: str) -> str:
    """Return the top-level module or package of a file."""
    return name.partition("/")[0].removesuffix(".py")


def changed_modules(modules: Mapping[str, bytes]) -> list[str]:
    """Return the kept modules whose content now differs, or that are no longer found."""
    return _changed(_as_text(modules))


def import_from(code: Mapping[str, str]) -> None:
    """Make this process and its workers import the given modules if any of them has changed since.

    They are imported from a copy that no other user can write to.

    Args:
        code: contents by path, with one character for each byte, so that they can be sent in messages.
    """
    if not _changed(code):
        return
    _copies.append(TemporaryDirectory(prefix="runner-code-"))
    _write(Path(_copies[-1].name), {name: content.encode("latin-1") for name, content in code.items()})
    sys.path.insert(0, _copies[-1].name)
    importlib.invalidate_caches()
    kept = {*map(_top, code)}
    for loaded in [module for module in sys.modules if module.partition(".")[0] in kept]:
        del sys.modules[loaded]


def _as_text(modules: Mapping[str, bytes]) -> dict[str, str]:
    return {name: content.decode("latin-1") for name, content in modules.items()}


def _changed(code: Mapping[str, str]) -> list[str]:
    """Return the modules whose content now differs, or that are no longer found."""

    def is_unchanged(name: str, content: str) -> bool:
        paths = (Path(entry) / name for entry in sys.path)
        current = next((path for path in paths if path.is_file()), None)
        return current is not None and current.read_bytes() == content.encode("latin-1")

    return [name for name, content in code.items() if not is_unchanged(name, content)]


def _write(folder: Path, modules: Mapping[str, bytes]) -> None:
    for name, content in modules.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
