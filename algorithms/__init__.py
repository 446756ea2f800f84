"""Changes of training, one class a file; loaded on first use, so that importing one imports no other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.batch_augment import BatchAugment
    from algorithms.ema import EMA
    from algorithms.gradient_clipping import GradientClipping
    from algorithms.label_smoothing import LabelSmoothing
    from algorithms.mixup import MixUp
    from algorithms.nan_guard import NaNGuard

__all__ = ["EMA", "BatchAugment", "GradientClipping", "LabelSmoothing", "MixUp", "NaNGuard"]

_MODULES = {
    "BatchAugment": "batch_augment",
    "EMA": "ema",
    "GradientClipping": "gradient_clipping",
    "LabelSmoothing": "label_smoothing",
    "MixUp": "mixup",
    "NaNGuard": "nan_guard",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'algorithms' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = getattr(importlib.import_module(f"algorithms.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
