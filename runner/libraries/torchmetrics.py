"""The one place that imports torchmetrics, three times faster than a plain ``import torchmetrics``."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from runner.libraries.torchvision import import_torchvision


def import_torchmetrics() -> ModuleType:
    """Return the ``torchmetrics`` module, imported without loading ``scipy.signal`` and ``transformers``.

    torchmetrics imports ``scipy.signal`` only to restore an attribute that newer versions lack, which takes 0.7 of the
    1.1 seconds. It also imports ``transformers``, if installed, for two classes that its text metrics may need, which
    takes another second. Unless they are loaded already, stand-ins with no more than these names take their places
    during the import and are removed afterwards, so that a later import gets the real modules.

    It imports torchvision too, if installed, even if nothing needs it; that is done first, by the function that copes
    with operators that do not load.
    """
    if "torchmetrics" in sys.modules:
        return importlib.import_module("torchmetrics")
    if find_spec("torchvision") is not None:
        import_torchvision()
    # torchmetrics patches the module only where this name is missing.
    stand_ins: dict[str, dict[str, Any]] = {"scipy.signal": {"hamming": None}}
    if (spec := find_spec("transformers")) is not None:
        stand_ins["transformers"] = {"__getattr__": _later, "__spec__": spec}
    placed = [name for name in stand_ins if name not in sys.modules]
    for name in placed:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(stand_ins[name])
    try:
        return importlib.import_module("torchmetrics")
    finally:
        for name in placed:
            del sys.modules[name]


class _Later:
    """A class of transformers that is imported when one of its attributes is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(importlib.import_module("transformers"), self._name), attribute)


def _later(name: str) -> _Later:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Later(name)
