"""The one place that imports torchmetrics, three times faster than a plain ``import torchmetrics``."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

from runner.torchvision_import import import_torchvision


def import_torchmetrics() -> ModuleType:
    """Returns the ``torchmetrics`` module, imported without loading ``scipy.signal``.

    torchmetrics imports ``scipy.signal`` only to give it back an attribute that newer versions lack, and that costs
    0.7 of the 1.1 seconds. Unless ``scipy.signal`` is loaded already, an empty module takes its place during the import
    and is removed afterwards, so that whoever imports ``scipy.signal`` later gets the real one.

    It imports torchvision too, where that is installed, even where nothing needs it: what does not load of that is then
    no reason to fail.
    """
    if "torchmetrics" in sys.modules or "scipy.signal" in sys.modules:
        return importlib.import_module("torchmetrics")
    if find_spec("torchvision") is not None:
        import_torchvision()
    stand_in = ModuleType("scipy.signal")
    stand_in.__dict__["hamming"] = None  # torchmetrics patches the module only where this name is missing
    sys.modules["scipy.signal"] = stand_in
    try:
        return importlib.import_module("torchmetrics")
    finally:
        del sys.modules["scipy.signal"]
