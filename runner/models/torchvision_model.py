"""Torchvision's models by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from runner.failures.errors import wrong_argument
from runner.libraries.torchvision import import_torchvision


def torchvision_model(name: str = "resnet50", num_classes: int = 1000) -> nn.Module:
    """Return a torchvision classification model with new weights: images `(N, 3, H, W)` -> logits `(N, C)`.

    Args:
        name: torchvision's name of the model, such as resnet18, resnet50 or convnext_tiny.
        num_classes: number of classes C.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
        ValueError: torchvision has no such model.
    """
    return _make(import_torchvision().models, name, num_classes)


def torchvision_segmentation(name: str = "lraspp_mobilenet_v3_large", num_classes: int = 21) -> nn.Module:
    """Return a torchvision segmentation model with new weights: images `(N, 3, H, W)` -> `{"out": (N, C, H, W)}`.

    Args:
        name: torchvision's name of the model, such as lraspp_mobilenet_v3_large, fcn_resnet50 or deeplabv3_resnet50.
        num_classes: number of classes C.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
        ValueError: torchvision has no such model.
    """
    return _make(import_torchvision().models.segmentation, name, num_classes, weights_backbone=None)


def _make(module: Any, name: str, num_classes: int, **options: Any) -> nn.Module:
    models = import_torchvision().models
    if name not in (known := models.list_models(module=module)):
        raise wrong_argument("name", name, f"torchvision has no such model; it has {', '.join(known)}")
    return models.get_model(name, weights=None, num_classes=num_classes, **options)
