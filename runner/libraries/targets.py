"""Prepare imports of the packages that a config names, before they are imported in the ordinary way."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

IMPORT_TORCHVISION = ("peft", "timm", "torchvision", "transformers")
_IMAGES = re.compile(r"\.(detection|image|multimodal)\b")  # parts of torchmetrics


def prepare_import(target: str) -> None:
    """Import the package of a dotted name with care if its ordinary import is slow, or fails without CUDA."""
    package = target.partition(".")[0]
    # These modules import torch, and most configs are checked without it.
    needs_torchvision = package in IMPORT_TORCHVISION or (package == "torchmetrics" and _IMAGES.search(target))
    if needs_torchvision and find_spec("torchvision") is not None:
        from runner.libraries.torchvision import import_torchvision

        import_torchvision()
    if package == "torchmetrics":
        from runner.libraries.torchmetrics import import_torchmetrics

        import_torchmetrics()


def find_in_working_directory(config: Any) -> None:
    """Add the working directory to the end of `sys.path` if a module that a config names is found only there.

    It is not on the path otherwise: a file in it, such as one of a run that someone else made, would run as soon as a
    library tries to import a package of the same name.
    """
    folder = os.getcwd()
    if folder in sys.path:
        return
    names = {text.partition(".")[0] for text in _strings(config) if "." in text}
    local = (name for name in sorted(names) if name.isidentifier() and _is_module(name))
    if any(name not in sys.modules and find_spec(name) is None for name in local):
        sys.path.append(folder)
        importlib.invalidate_caches()


def _is_module(name: str) -> bool:
    return Path(f"{name}.py").is_file() or Path(name).is_dir()


def _strings(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping | list | tuple):
        for value in config.values() if isinstance(config, Mapping) else config:
            yield from _strings(value)
    elif isinstance(config, str):
        yield config
