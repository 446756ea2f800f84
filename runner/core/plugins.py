"""Packages with one class per file, such as `runner.callbacks`; new files need no registration."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

CLASS = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)


class Plugins:
    """The classes of a package, each imported on first access.

    `load` and `names` serve as the package's `__getattr__` and `__dir__`. Each class is named after its file, without
    underscores and ignoring case: `SpeedMonitor` is in `speed_monitor.py`. Files whose names begin with an underscore
    hold shared code, and no such class.

    Raises:
        ImportError: the package is imported from the top of a checkout, where its classes would exist twice.
    """

    def __init__(self, package: str, folder: str) -> None:
        if "." not in package:
            remedy = "give a module of your own another name"
            raise ImportError(f"{package}/ of the runner is imported as runner.{package}, not as {package}; {remedy}")
        self._package = package
        self._folder = Path(folder)
        self.files = {_plain(file.stem): file.stem for file in self._folder.glob("[!_]*.py")}

    def load(self, name: str) -> Any:
        """Return a class by its name, or all names as `__all__`.

        Raises:
            AttributeError: no file has a class of that name.
        """
        if name == "__all__":
            return self.names()
        if not name[:1].isupper():
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        if (file := self.files.get(_plain(name))) is None:
            raise AttributeError(
                f"module {self._package!r} has no attribute {name!r}; it has {', '.join(self.names())}"
            )
        return getattr(importlib.import_module(f"{self._package}.{file}"), name)

    def names(self) -> list[str]:
        """Return the names of all classes, sorted. Files are read, but not imported."""
        return sorted(name for file in self.files.values() for name in self.classes_of(file))

    def classes_of(self, file: str) -> list[str]:
        """Return the names of the classes that a file, named without its suffix, adds to the package."""
        names = CLASS.findall((self._folder / f"{file}.py").read_text(encoding="utf-8"))
        return [name for name in names if _plain(name) == _plain(file)]


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
