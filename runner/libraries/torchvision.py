"""Import torchvision even if its compiled operators do not load. No other module imports it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

from runner.libraries.extras import how_to_install


def import_torchvision(name: str = "torchvision") -> ModuleType:
    """Return `torchvision`, or one of its modules by its full name.

    The usual wheel needs CUDA libraries for its operators and cannot be imported with a torch that lacks them. In that
    case, two operators that it looks up are declared but not defined: only `ops.nms` and `io.decode_image` fail.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchvision":
            raise  # a library that torchvision needs is missing
        message = f"torchvision is not installed here: {how_to_install('vision')}"
        raise ModuleNotFoundError(message, name="torchvision") from error
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
        del sys.modules[module]  # half loaded
    declare_operators()
    return importlib.import_module(name)


def declare_operators() -> None:
    """Declare the operators that torchvision looks up, for a process in which its own do not load."""
    for operator in {"nms", "qnms"} - _DECLARED:
        _LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.add(operator)


def operators_are_declared() -> bool:
    """Return whether this process declared stand-ins for torchvision's operators, which did not load."""
    return bool(_DECLARED)


_DECLARED: set[str] = set()
# Declarations last as long as the library object that made them.
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
