"""The one place that imports Hugging Face's libraries, which are optional."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_hf(name: str) -> ModuleType:
    """Returns ``transformers``, ``datasets`` or one of their modules, or of what they bring, by its full name.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # something that it needs
        raise ModuleNotFoundError(f"{package} is not installed here: pip install -e '.[hf]'", name=package) from error
