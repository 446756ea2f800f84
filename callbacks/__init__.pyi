from runner.callbacks.activation_monitor import ActivationMonitor
from runner.callbacks.checkpoint_saver import CheckpointSaver
from runner.callbacks.console_summary import ConsoleSummary
from runner.callbacks.crash_bundle import CrashBundle
from runner.callbacks.early_stopper import EarlyStopper
from runner.callbacks.event_trace import EventTrace
from runner.callbacks.export_for_inference import ExportForInference
from runner.callbacks.generate import Generate
from runner.callbacks.image_visualizer import ImageVisualizer
from runner.callbacks.in_memory_logger import InMemoryLogger
from runner.callbacks.json_lines_logger import JSONLinesLogger
from runner.callbacks.learning_curves import LearningCurves
from runner.callbacks.load_checkpoint import LoadCheckpoint
from runner.callbacks.lr_monitor import LRMonitor
from runner.callbacks.memory_monitor import MemoryMonitor
from runner.callbacks.memory_snapshot import MemorySnapshot
from runner.callbacks.mlflow_logger import MLflowLogger
from runner.callbacks.mlperf_callback import MLPerfCallback
from runner.callbacks.nan_monitor import NaNMonitor
from runner.callbacks.oom_observer import OOMObserver
from runner.callbacks.optimizer_monitor import OptimizerMonitor
from runner.callbacks.progress_bar import ProgressBar
from runner.callbacks.progress_lines import ProgressLines
from runner.callbacks.replica_monitor import ReplicaMonitor
from runner.callbacks.runtime_estimator import RuntimeEstimator
from runner.callbacks.sample_ledger import SampleLedger
from runner.callbacks.speed_monitor import SpeedMonitor
from runner.callbacks.state_digest import StateDigest
from runner.callbacks.sweep_pruner import SweepPruner
from runner.callbacks.system_metrics_monitor import SystemMetricsMonitor
from runner.callbacks.tensorboard_logger import TensorBoardLogger
from runner.callbacks.text_examples import TextExamples
from runner.callbacks.threshold_stopper import ThresholdStopper
from runner.callbacks.torch_profiler import TorchProfiler
from runner.callbacks.wandb_logger import WandBLogger

__all__ = [
    "ActivationMonitor",
    "CheckpointSaver",
    "ConsoleSummary",
    "CrashBundle",
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
    "ProgressLines",
    "ReplicaMonitor",
    "RuntimeEstimator",
    "SampleLedger",
    "SpeedMonitor",
    "StateDigest",
    "SweepPruner",
    "SystemMetricsMonitor",
    "TensorBoardLogger",
    "TextExamples",
    "ThresholdStopper",
    "TorchProfiler",
    "WandBLogger",
]
