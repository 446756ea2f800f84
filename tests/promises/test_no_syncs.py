"""Nothing on the per-batch path waits for the device or for MLflow.

The number of values that the training thread reads back from tensors is compared with that of a hand-written loop. Two
dispatch modes of `benchmarks/operations.py` count every operation and method of this thread that makes the host wait:
reading a value, copying from a device, and operations whose result has a data-dependent size. The logger's thread is
allowed to read values back.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmark_modules import load
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from runner import Callback, ClassificationModel, LanguageModel, LoggerDestination, Trainer
from runner.algorithms import EMA, BatchAugment, GradientClipping, LabelSmoothing, MixUp, NaNGuard
from runner.callbacks import (
    ActivationMonitor,
    CheckpointSaver,
    ConsoleSummary,
    EarlyStopper,
    EventTrace,
    ImageVisualizer,
    InMemoryLogger,
    JSONLinesLogger,
    LearningCurves,
    LRMonitor,
    MemoryMonitor,
    MemorySnapshot,
    MLflowLogger,
    MLPerfCallback,
    NaNMonitor,
    OOMObserver,
    OptimizerMonitor,
    ProgressBar,
    ReplicaMonitor,
    RuntimeEstimator,
    SampleLedger,
    SpeedMonitor,
    SystemMetricsMonitor,
    TensorBoardLogger,
    ThresholdStopper,
    TorchProfiler,
    WandBLogger,
)
from runner.data import TensorLoader
from runner.optim.schedulers import cosine_annealing

FIRST, LAST = 10, 40  # batches whose operations are counted, of one epoch of 48
counting = load("benchmark_of_operations", "operations.py")


def make_watch() -> Any:
    return counting.Watch(range(FIRST, LAST), called=None)


def make_module() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(384, 1, 8, 8, generator=generator), torch.arange(384) % 4


def batches() -> Any:
    """Yield shuffled batches of eight samples, selected as in a hand-written loop."""
    images, targets = make_data()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    for start in range(0, len(images), 8):
        yield images[order[start : start + 8]], targets[order[start : start + 8]]


def by_hand(make_optimizer: Any, precision: str = "fp32", parts: int = 1) -> Counter[str]:
    """Return the reads of a hand-written loop with forward and backward passes, optimizer steps and an accuracy."""
    module = make_module()
    optimizer = make_optimizer(module.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 48)
    accuracy = MulticlassAccuracy(4, average="micro", validate_args=False)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "amp_fp16")
    watch = make_watch()
    for number, (images, targets) in enumerate(batches()):
        watch.before_batch(number)
        optimizer.zero_grad()
        for inputs, labels in zip(images.chunk(parts), targets.chunk(parts), strict=True):
            with torch.autocast("cpu", torch.float16, enabled=precision == "amp_fp16"):
                logits = module(inputs)
                loss = F.cross_entropy(logits, labels) / parts
            scaler.scale(loss).backward()
            accuracy.update(logits.detach(), labels)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    return watch.counts.reads


def with_trainer(make_optimizer: Any, run_dir: Path, **arguments: Any) -> Counter[str]:
    """Return the reads of the Trainer."""
    watch = make_watch()
    with Trainer(
        **{
            "model": ClassificationModel(make_module(), 4),
            "train_dataloader": TensorLoader(*make_data(), batch_size=8, shuffle=True),
            "eval_dataloader": TensorLoader(*make_data(), batch_size=64, shuffle=False),
            "optimizers": make_optimizer,
            "schedulers": cosine_annealing(t_warmup="5ba"),
            "device": "cpu",
            "run_dir": run_dir,
            **arguments,
            "callbacks": [counting.Watching(watch), *arguments.get("callbacks", [])],
        }
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 48
    return watch.counts.reads


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def test_reads_are_counted():
    counts = counting.Counts()
    x = torch.tensor([0.0, 1.0])
    with counting.Operations(counts), counting.Methods(counts):
        x[0].item()
        bool(x[1] > 0)
        x.nonzero()
        x.tolist()
        x.to("meta")
    reads = counts.reads
    assert reads["aten._local_scalar_dense"] == 2 and reads["aten.nonzero"] == 1
    assert reads["tolist"] == 1 and counts.copies == {"pageable": 1}


def test_a_hand_written_loop_reads_nothing_with_sgd():
    assert not by_hand(sgd)
    assert by_hand(sgd, "amp_fp16")["item"] == LAST - FIRST  # the scaler reads whether a gradient is infinite


@pytest.mark.parametrize(
    ("make_optimizer", "precision", "parts"),
    [(sgd, "fp32", 1), (sgd, "fp32", 4), (adamw, "fp32", 1), (sgd, "amp_fp16", 1), (adamw, "amp_fp16", 2)],
)
def test_the_trainer_reads_no_more_than_a_hand_written_loop(make_optimizer, precision: str, parts: int, tmp_path: Path):
    reads = with_trainer(make_optimizer, tmp_path, precision=precision, grad_accum=parts)
    assert reads <= by_hand(make_optimizer, precision, parts)


def test_callbacks_read_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    memory = InMemoryLogger()
    callbacks = [CheckpointSaver(), LearningCurves(), ProgressBar(), ConsoleSummary(), MLflowLogger()]
    callbacks += [SpeedMonitor(), LRMonitor(), JSONLinesLogger(), memory]
    callbacks += [OptimizerMonitor(), ActivationMonitor(), MemoryMonitor(dist_aggregate_batch_interval=5), NaNMonitor()]
    callbacks += [RuntimeEstimator(), ThresholdStopper("loss", 0.0), MemorySnapshot("1ba"), OOMObserver()]
    callbacks += [EarlyStopper("loss"), EventTrace(), ImageVisualizer(), ReplicaMonitor(), SystemMetricsMonitor()]
    callbacks += [SampleLedger(), TorchProfiler()]
    callbacks += [
        make()
        for package, make in (
            ("mlperf_logging", lambda: MLPerfCallback("mlperf", 0)),
            ("tensorboard", TensorBoardLogger),
            ("wandb", WandBLogger),
        )
        if importlib.util.find_spec(package) is not None
    ]
    assert with_trainer(sgd, tmp_path / "run", callbacks=callbacks) <= by_hand(sgd)
    assert len(memory.data["loss/train/total"]) == 48  # the logger's thread has read all values back
    assert {"lr-SGD/group0", "throughput/samples_per_sec", "metrics/eval/MulticlassAccuracy"} <= memory.data.keys()


@pytest.mark.parametrize(
    "algorithms",
    [
        [BatchAugment(pad=1, flip="random")],
        [MixUp(), LabelSmoothing(), EMA("10ba"), GradientClipping("norm", 1.0)],
        [GradientClipping("adaptive", 0.1)],
        [GradientClipping("value", 0.1)],
    ],
    ids=lambda algorithms: "-".join(type(algorithm).__name__ for algorithm in algorithms),
)
def test_algorithms_read_nothing(algorithms, tmp_path: Path):
    assert with_trainer(sgd, tmp_path, algorithms=algorithms, grad_accum=2) <= by_hand(sgd)


@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
def test_nan_guard_reads_once_per_batch(policy: str, tmp_path: Path):
    reads = with_trainer(sgd, tmp_path, algorithms=[NaNGuard(policy, "10ba")])
    assert reads - by_hand(sgd) == {"tolist": LAST - FIRST}


def test_a_language_model_reads_nothing(tmp_path: Path):
    tokens = torch.randint(16, (384, 9), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] < 3, -100)
    reads = with_trainer(
        sgd,
        tmp_path,
        model=LanguageModel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))),
        train_dataloader=TensorLoader(tokens[:, :-1].contiguous(), targets, batch_size=8, shuffle=True),
        eval_dataloader=None,
        grad_accum=4,
        loggers=[InMemoryLogger()],
    )
    assert not reads


def test_learning_rates_that_are_tensors_are_set_without_a_read(tmp_path: Path):
    def capturable(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=torch.tensor(0.1))

    plain = with_trainer(capturable, tmp_path, schedulers=None)
    assert with_trainer(capturable, tmp_path, callbacks=[LRMonitor()], loggers=[InMemoryLogger()]) <= plain


def test_values_are_read_on_the_loggers_thread(tmp_path: Path):
    threads = set()

    class ThreadRecorder(LoggerDestination):
        def log_metrics(self, metrics, step):
            threads.add(threading.current_thread().name)
            assert all(isinstance(value, float) for value in metrics.values())

    class Wait(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 20:
                never_set = threading.Event()
                for _ in range(200):
                    if threads or never_set.wait(0.05):
                        break

    with_trainer(sgd, tmp_path, loggers=[ThreadRecorder()], callbacks=[Wait()])
    assert "logger" in threads
