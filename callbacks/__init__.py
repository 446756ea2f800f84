"""Observers and logger destinations, one class a file; loaded on first use, so that importing one imports no other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callbacks.activation_monitor import ActivationMonitor
    from callbacks.checkpoint_saver import CheckpointSaver
    from callbacks.console_summary import ConsoleSummary
    from callbacks.early_stopper import EarlyStopper
    from callbacks.event_trace import EventTrace
    from callbacks.export_for_inference import ExportForInference
    from callbacks.generate import Generate
    from callbacks.image_visualizer import ImageVisualizer
    from callbacks.in_memory_logger import InMemoryLogger
    from callbacks.json_lines_logger import JSONLinesLogger
    from callbacks.learning_curves import LearningCurves
    from callbacks.load_checkpoint import LoadCheckpoint
    from callbacks.lr_monitor import LRMonitor
    from callbacks.memory_monitor import MemoryMonitor
    from callbacks.memory_snapshot import MemorySnapshot
    from callbacks.mlflow_logger import MLflowLogger
    from callbacks.mlperf_callback import MLPerfCallback
    from callbacks.nan_monitor import NaNMonitor
    from callbacks.oom_observer import OOMObserver
    from callbacks.optimizer_monitor import OptimizerMonitor
    from callbacks.progress_bar import ProgressBar
    from callbacks.replica_monitor import ReplicaMonitor
    from callbacks.runtime_estimator import RuntimeEstimator
    from callbacks.speed_monitor import SpeedMonitor
    from callbacks.state_digest import StateDigest
    from callbacks.system_metrics_monitor import SystemMetricsMonitor
    from callbacks.tensorboard_logger import TensorBoardLogger
    from callbacks.threshold_stopper import ThresholdStopper
    from callbacks.torch_profiler import TorchProfiler
    from callbacks.wandb_logger import WandBLogger

__all__ = [
    "ActivationMonitor",
    "CheckpointSaver",
    "ConsoleSummary",
    "EarlyStopper",
    "EventTrace",
    "ExportForInference",
    "Generate",
    "ImageVisualizer",
    "InMemoryLogger",
    "JSONLinesLogger",
    "LRMonitor",
    "LearningCurves",
    "LoadCheckpoint",
    "MLPerfCallback",
    "MLflowLogger",
    "MemoryMonitor",
    "MemorySnapshot",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "ProgressBar",
    "ReplicaMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
    "StateDigest",
    "SystemMetricsMonitor",
    "TensorBoardLogger",
    "ThresholdStopper",
    "TorchProfiler",
    "WandBLogger",
]

_MODULES = {
    "ActivationMonitor": "activation_monitor",
    "CheckpointSaver": "checkpoint_saver",
    "ConsoleSummary": "console_summary",
    "EarlyStopper": "early_stopper",
    "EventTrace": "event_trace",
    "ExportForInference": "export_for_inference",
    "Generate": "generate",
    "ImageVisualizer": "image_visualizer",
    "InMemoryLogger": "in_memory_logger",
    "JSONLinesLogger": "json_lines_logger",
    "LRMonitor": "lr_monitor",
    "LearningCurves": "learning_curves",
    "LoadCheckpoint": "load_checkpoint",
    "MLPerfCallback": "mlperf_callback",
    "MLflowLogger": "mlflow_logger",
    "MemoryMonitor": "memory_monitor",
    "MemorySnapshot": "memory_snapshot",
    "NaNMonitor": "nan_monitor",
    "OOMObserver": "oom_observer",
    "OptimizerMonitor": "optimizer_monitor",
    "ProgressBar": "progress_bar",
    "ReplicaMonitor": "replica_monitor",
    "RuntimeEstimator": "runtime_estimator",
    "SpeedMonitor": "speed_monitor",
    "StateDigest": "state_digest",
    "SystemMetricsMonitor": "system_metrics_monitor",
    "TensorBoardLogger": "tensorboard_logger",
    "ThresholdStopper": "threshold_stopper",
    "TorchProfiler": "torch_profiler",
    "WandBLogger": "wandb_logger",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'callbacks' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = getattr(importlib.import_module(f"callbacks.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
