"""MosaicML Composer's names for callbacks and algorithms: what was written for it runs with only the import changed.

.. code-block:: python

    from runner.compat.composer import Callback, Event, Logger, State, Time

A subclass of `Callback` or `Algorithm` from here is one of this library, so it works in a config, on several ranks and
in a resumed run. Its hooks get Composer's view of the state, of time and of the logger. Anything without a counterpart
raises an error that says what to use. Only these classes make views: other callbacks, and runs without such classes,
    have no overhead.
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

_FROM_HERE = "import the names in runner.compat.composer.__all__"

_HERE = {
    **dict.fromkeys(("checkpoint", "core", "devices", "utils"), _FROM_HERE),
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
    if name in _HERE:  # an ImportError, because `from ... import` would hide the message of an AttributeError
        raise ImportError(f"runner.compat.composer has no {name}: {_HERE[name]}")
    raise AttributeError(f"module 'runner.compat.composer' has no attribute {name!r}; it has {', '.join(__all__)}")
