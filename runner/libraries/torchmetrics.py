"""The one place that imports torchmetrics, three times faster than a plain ``import torchmetrics``."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from runner.libraries.torchvision import import_torchvision


def import_torchmetrics() -> ModuleType:
    """Returns the ``torchmetrics`` module, imported without loading ``scipy.signal`` and ``transformers``.

    torchmetrics imports ``scipy.signal`` only to give it back an attribute that newer versions lack, and that costs
    0.7 of the 1.1 seconds; and, where it is installed, ``transformers`` for two classes that its metrics of texts may
    need, which costs another second. Unless they are loaded already, modules that hold no more than that take their
    places during the import and are removed afterwards, so that whoever imports them later gets the real ones.

    It imports torchvision too, where that is installed, even where nothing needs it: what does not load of that is then
    no reason to fail.
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
    """A class of transformers that is imported when something of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(importlib.import_module("transformers"), self._name), attribute)


def _later(name: str) -> _Later:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Later(name)
