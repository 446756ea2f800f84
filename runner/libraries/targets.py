"""Import libraries with care that a config names, before anyone imports them in the ordinary way."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

IMPORT_TORCHVISION = ("peft", "timm", "torchvision", "transformers")


def prepare_import(target: str) -> None:
    """Make the package of a dotted name importable if its ordinary import is slow, or fails without CUDA."""
    package = target.partition(".")[0]
    # Imported here, because they import torch, and most configs are checked without it.
    if package == "torchmetrics":
        from runner.libraries.torchmetrics import import_torchmetrics

        import_torchmetrics()
    elif package in IMPORT_TORCHVISION and find_spec("torchvision") is not None:
        from runner.libraries.torchvision import import_torchvision

        import_torchvision()


def find_in_working_directory(config: Any) -> None:
    """Put the working directory at the end of `sys.path` if a config names a module that is only there.

    It is not there before: files in it, such as those of a run that someone else made, would run as soon as a library
    tries to import a package of that name.
    """
    here = os.getcwd()
    if here in sys.path:
        return
    tops = {text.partition(".")[0] for text in _texts(config) if "." in text}
    local = (top for top in sorted(tops) if top.isidentifier() and (Path(f"{top}.py").is_file() or Path(top).is_dir()))
    if any(top not in sys.modules and find_spec(top) is None for top in local):
        sys.path.append(here)
        importlib.invalidate_caches()


def _texts(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping | list | tuple):
        for value in config.values() if isinstance(config, Mapping) else config:
            yield from _texts(value)
    elif isinstance(config, str):
        yield config
