"""Import libraries with care that a config names, before anyone imports them in the ordinary way."""

from __future__ import annotations

from importlib.util import find_spec

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
