"""The one place of data that imports Hugging Face's libraries, which are optional."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_hf(name: str) -> ModuleType:
    """Returns ``transformers``, ``datasets`` or another of these libraries.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise  # something that it needs
        raise ModuleNotFoundError(f"{name} is not installed here: pip install -e '.[hf]'", name=name) from error
