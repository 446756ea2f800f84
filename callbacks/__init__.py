"""Observers and logger destinations, one class a file; loaded on first use, so that importing one imports no other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callbacks.checkpoint_saver import CheckpointSaver
    from callbacks.console_summary import ConsoleSummary
    from callbacks.early_stopper import EarlyStopper
    from callbacks.in_memory_logger import InMemoryLogger
    from callbacks.json_lines_logger import JSONLinesLogger
    from callbacks.learning_curves import LearningCurves
    from callbacks.lr_monitor import LRMonitor
    from callbacks.mlflow_logger import MLflowLogger
    from callbacks.progress_bar import ProgressBar
    from callbacks.speed_monitor import SpeedMonitor

__all__ = [
    "CheckpointSaver",
    "ConsoleSummary",
    "EarlyStopper",
    "InMemoryLogger",
    "JSONLinesLogger",
    "LRMonitor",
    "LearningCurves",
    "MLflowLogger",
    "ProgressBar",
    "SpeedMonitor",
]

_MODULES = {
    "CheckpointSaver": "checkpoint_saver",
    "ConsoleSummary": "console_summary",
    "EarlyStopper": "early_stopper",
    "InMemoryLogger": "in_memory_logger",
    "JSONLinesLogger": "json_lines_logger",
    "LRMonitor": "lr_monitor",
    "LearningCurves": "learning_curves",
    "MLflowLogger": "mlflow_logger",
    "ProgressBar": "progress_bar",
    "SpeedMonitor": "speed_monitor",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'callbacks' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = getattr(importlib.import_module(f"callbacks.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
