"""MosaicML Composer's interface: its callbacks and algorithms run here after a change of their imports.

    from runner.compat.composer import Callback, Event, Logger, State, Time

A subclass of this `Callback` or `Algorithm` is also a subclass of this library's, so it works in a config, on several
ranks and in a resumed run. Its hooks get Composer's view of the state, of time and of the logger. Names without a
counterpart raise an error that says what to use. Only hooks of these classes cost the time to make views.
"""

from __future__ import annotations

from typing import Any

from runner.compat.composer import dist
from runner.compat.composer.hooks import Algorithm, Callback
from runner.compat.composer.logger import Logger
from runner.compat.composer.state import Device, State, get_precision_context, save_checkpoint
from runner.compat.composer.time import Time, Timestamp, ensure_time
from runner.timing.event import Event
from runner.timing.time import TimeUnit
from runner.training.precision import Precision

Batch = Any

__all__ = [
    "Algorithm",
    "Batch",
    "Callback",
    "Device",
    "Event",
    "Logger",
    "Precision",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "dist",
    "ensure_time",
    "get_precision_context",
    "save_checkpoint",
]

_IMPORT_NAMES = "import the names in runner.compat.composer.__all__"

_REMEDIES = {
    **dict.fromkeys(("checkpoint", "core", "devices", "utils"), _IMPORT_NAMES),
    **dict.fromkeys(("algorithms", "functional"), "use runner.algorithms"),
    **dict.fromkeys(("callbacks", "loggers", "CheckpointSaver"), "use runner.callbacks"),
    **dict.fromkeys(("profiler", "Profiler"), "use runner.callbacks.TorchProfiler"),
    "AlgorithmPass": "declare runs_before, runs_after and conflicts_with in the class",
    "PyTorchScheduler": "use torch.optim.lr_scheduler.LRScheduler",
    **dict.fromkeys(
        ("optim", "loss", "metrics"), "use torch.optim, runner.optim.schedulers, torch.nn and torchmetrics"
    ),
    **dict.fromkeys(("models", "datasets"), "use runner.models and runner.data"),
    "ComposerClassifier": "wrap the network in runner.ClassificationModel",
    "ComposerModel": "use runner.Model: forward, loss, metrics and update_metric have the same names",
    "DataSpec": "return loaders, and override Model.num_samples and Model.num_tokens",
    "Engine": "use runner.Engine",
    "Evaluator": "use runner.Evaluator, with the same arguments",
    "HuggingFaceModel": "use runner.models.hf.causal_lm, or override runner.Model",
    "LoggerDestination": "use runner.LoggerDestination: log_metrics(metrics, step) and the others have the same names",
    "Trainer": "use runner.Trainer; docs/from_composer.md has its arguments side by side",
    "ensure_tuple": "write tuple(value)",
    "module_surgery": "use runner.replace_modules",
    "reproducibility": "give trainer.seed and trainer.deterministic",
}


def __getattr__(name: str) -> Any:
    if name in _REMEDIES:  # ImportError: `from ... import` would hide an AttributeError's message
        raise ImportError(f"runner.compat.composer has no {name}: {_REMEDIES[name]}")
    raise AttributeError(f"module 'runner.compat.composer' has no attribute {name!r}; it has {', '.join(__all__)}")
