"""An experiment runner for PyTorch: an event engine, callbacks that watch, algorithms that change training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.checkpoints.digest import first_difference
    from runner.checkpoints.files import discard, is_complete
    from runner.checkpoints.snapshot import can_save_on_this_rank, capture, save_checkpoint
    from runner.checkpoints.writing import write_checkpoint
    from runner.core.destination import LoggerDestination, MetricRecord
    from runner.core.engine import Engine, evaluation_weights
    from runner.core.hooks import Algorithm, Callback
    from runner.core.logger import Logger
    from runner.core.randomness import stream_seed
    from runner.core.state import Batch, State
    from runner.distributed.ranks import get_global_rank, get_local_rank, get_world_size
    from runner.models.classification import ClassificationModel
    from runner.models.language import LanguageModel
    from runner.models.model import Model
    from runner.models.supervised import SupervisedModel
    from runner.models.surgery import replace_modules
    from runner.program.in_python import SavedModel, load, replay
    from runner.recorder.recorder import Recorder
    from runner.timing.event import Event
    from runner.timing.time import Interval, Time, Timestamp, TimeUnit
    from runner.training.evaluator import Evaluator
    from runner.training.fit_result import FitResult
    from runner.training.trainer import Trainer
    from runner.verbs.verdict import Verdict, verdict

__version__ = "0.1.0"

_PACKAGES = ("algorithms", "callbacks", "data", "models", "optim")  # for `runner.callbacks.EarlyStopper`

# Loaded on first use: importing `runner` must stay cheap for `--help`, config errors and helper processes.
_MODULES = {
    "Algorithm": "core.hooks",
    "Batch": "core.state",
    "Callback": "core.hooks",
    "ClassificationModel": "models.classification",
    "Engine": "core.engine",
    "Evaluator": "training.evaluator",
    "Event": "timing.event",
    "FitResult": "training.fit_result",
    "Interval": "timing.time",
    "LanguageModel": "models.language",
    "Logger": "core.logger",
    "LoggerDestination": "core.destination",
    "Model": "models.model",
    "MetricRecord": "core.destination",
    "Recorder": "recorder.recorder",
    "SavedModel": "program.in_python",
    "State": "core.state",
    "SupervisedModel": "models.supervised",
    "Time": "timing.time",
    "TimeUnit": "timing.time",
    "Timestamp": "timing.time",
    "Trainer": "training.trainer",
    "Verdict": "verbs.verdict",
    "can_save_on_this_rank": "checkpoints.snapshot",
    "capture": "checkpoints.snapshot",
    "discard": "checkpoints.files",
    "evaluation_weights": "core.engine",
    "first_difference": "checkpoints.digest",
    "get_global_rank": "distributed.ranks",
    "get_local_rank": "distributed.ranks",
    "get_world_size": "distributed.ranks",
    "is_complete": "checkpoints.files",
    "load": "program.in_python",
    "replace_modules": "models.surgery",
    "replay": "program.in_python",
    "save_checkpoint": "checkpoints.snapshot",
    "stream_seed": "core.randomness",
    "verdict": "verbs.verdict",
    "write_checkpoint": "checkpoints.writing",
}

__all__ = [
    "Algorithm",
    "Batch",
    "Callback",
    "ClassificationModel",
    "Engine",
    "Evaluator",
    "Event",
    "FitResult",
    "Interval",
    "LanguageModel",
    "Logger",
    "LoggerDestination",
    "MetricRecord",
    "Model",
    "Recorder",
    "SavedModel",
    "State",
    "SupervisedModel",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
    "Verdict",
    "can_save_on_this_rank",
    "capture",
    "discard",
    "evaluation_weights",
    "first_difference",
    "get_global_rank",
    "get_local_rank",
    "get_world_size",
    "is_complete",
    "load",
    "replace_modules",
    "replay",
    "save_checkpoint",
    "stream_seed",
    "verdict",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"runner.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return importlib.import_module(f"runner.{name}")
    raise AttributeError(f"module 'runner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
