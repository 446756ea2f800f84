"""Predicts the peak memory of training: batches go through the real Trainer as tensors without memory.

Weights, batches and all results are torch's fake tensors: they have a shape, a type and a device, which determine the
kernels, but neither values nor memory. Torch shards sharded models over ranks that do not exist. Of replicas only one
is trained, and the memory of DDP is added. Memory that an operation uses internally while it runs is counted only if it
is large.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.config import build
from runner.config.experiment import Experiment
from runner.config.section import Section
from runner.core.hooks import Callback
from runner.core.logger import Logger
from runner.core.state import State
from runner.device.batch import map_tensors
from runner.distributed.blocks import find_units
from runner.distributed.collectives import destroy_process_group
from runner.timing.event import Event
from runner.training.precision import Precision
from runner.trials.live_bytes import LiveBytes
from runner.trials.sizes import Peak, size_of


def predict_peak(
    experiment: Experiment, model: Any, batch: Any, loader: Any, parts: Mapping[str, Any], ranks: int
) -> Peak:
    """Train two batches without values, and return the memory that they would take.

    The model loses its values; the batch has the size that a rank gets, and `loader` yields a batch once per epoch.

    Raises:
        RuntimeError: the model or an algorithm reads values.
    """
    section = experiment.trainer
    precision = {"tf32": "fp32", "amp_fp16": "amp_bf16"}.get(section.get("precision"), section.get("precision", "fp32"))
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # failures raise exceptions anyway
    changed = {"device": "cpu", "precision": precision, "compile": False, "load_path": None, "iteration_length": None}
    model.metrics = lambda train: {}
    model.to = lambda *_, **__: model  # it is on its device, and fake tensors cannot be swapped in place
    is_sharded = ranks > 1 and section.get("parallel") == "fsdp"
    is_replica = ranks > 1 and not is_sharded and section.get("tensor_parallel", 1) == 1
    gathered = _gathered(model, section) if is_sharded else 0
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        _OnCPU(fake) as live,
        _pretended(1 if is_replica else ranks),
        tempfile.TemporaryDirectory(prefix="runner-check-") as folder,
    ):
        watch = _Watch(live, is_replica, begins_sharded=experiment.init_weights == "by_name")
        with fake:
            _drop_values(model, Precision(precision).weight_dtype)
            batch = map_tensors(batch, torch.empty_like, objects=lambda x: None if isinstance(x, Mapping) else x)
        trainer = build.assemble(
            experiment.with_trainer(**changed),
            Path(folder, "run"),
            "check",
            model=model,
            train_dataloader=loader(batch),
            **{**parts, "callbacks": [watch]},
        )
        with trainer:
            trainer.fit()
    return Peak(max(watch.total, live.peak), watch.activations, gathered, watch.microbatches)


@contextmanager
def _pretended(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a group whose other ranks do not exist; data from them has a size but no values."""
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield
    finally:
        destroy_process_group()


class _OnCPU(LiveBytes):
    """Counts the memory of oneDNN and gloo, too.

    oneDNN computes the gradients of a convolution in a layout of its own. gloo gathers into memory of its own, and sums
    in a copy.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format and prod(args[0]) >= 1 << 20:
            with self.fake:  # FSDP gathers into it, so its values are undefined anyway
                return super().__torch_dispatch__(func, types, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        if func is torch.ops.aten.convolution_backward.default:
            inputs, weight = (0 if tensor is None else tensor.nbytes for tensor in result[:2])
            self.peak = max(self.peak, self.live + 2 * inputs, self.live + weight)
        elif func in (torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default):
            self.peak = max(self.peak, self.live + max(tensor.nbytes for tensor in args[:2]))
        return result


class _Watch(Callback):
    """Reads the live memory, and ends training after two batches; in the second, optimizers have their state."""

    def __init__(self, live: LiveBytes, keeps_gradients: bool, begins_sharded: bool) -> None:
        self.live = live
        self.keeps_gradients = keeps_gradients
        self.begins_sharded = begins_sharded
        self.total = self.activations = self.microbatches = self._start = 0

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_START and self.begins_sharded:
            self.live.peak = self.live.live  # only here, and on no real rank, are the weights whole
        elif event is Event.BATCH_START:
            self.microbatches = 0
        elif event is Event.BEFORE_FORWARD:
            self.microbatches += 1
            # DDP has memory for all gradients throughout.
            for parameter in state.unwrapped_model.parameters() if self.keeps_gradients else ():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.total = max(self.total, self.live.peak)
            self.live.peak = self.live.live
            self._start = self.live.live - size_of(state.microbatch)
        elif event in (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD) and self._start:
            # A model with its own training_step has only the second of these events.
            self.activations = max(self.activations, self.live.peak - self._start)
            self._start = 0
        elif event is Event.BATCH_END and state.timestamp.batch > 1:
            state.stop_training()


def _drop_values(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace the tensors of a model with fake ones, within the mode; shared tensors stay shared."""
    replaced: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(tensor) not in replaced:
                kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                replaced[id(tensor)] = tensor, nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            setattr(module, name, replaced[id(tensor)][1])


def _gathered(model: nn.Module, section: Section) -> int:
    """Return the bytes of a sharded model that a rank gathers at once: two blocks, and everything outside of blocks."""
    blocks = sorted(size_of([*unit.parameters()]) for unit in find_units(model).values())
    root = size_of([*model.parameters()]) - sum(blocks)
    size = root + sum(blocks[-2:])
    return size // 2 if section.get("gather_dtype") and section.get("precision") != "bf16" else size
