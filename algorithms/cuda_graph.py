"""CUDA graphs of a training step: the GPU work of a batch is recorded once, and then launched with two calls."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner import Algorithm, Logger, State
from runner.algorithms._recording import Recording, layout_of
from runner.algorithms._whole_step import Step, check_can_join, join_loss

log = logging.getLogger("runner")

DEVICES = ("cuda",)


class CUDAGraph(Algorithm):
    """Records forward pass, loss and backward pass as CUDA graphs, which the host then launches with two calls a batch.

    This pays off if the host cannot launch kernels as fast as the GPU runs them: for small models or small batches. The
    first batch is recorded, after three passes that leave no trace; batches of another shape, such as a smaller last
    one, evaluations and optimizers run as usual. Dropout uses the seeds of each batch, as without graphs.

    Outputs and gradients lie in memory that the next batch overwrites. Decisions in the model's Python code (a branch,
    a random number from Python) are made once, during recording.

    Raises:
        ValueError: after loading, the device is not a GPU; a batch is split into microbatches, whose gradients would
            overwrite each other; the model is sharded or has a `training_step`; another algorithm acts between the
            forward pass and the loss; or, when training starts, the model is compiled, or DDP looks for unused
            parameters or has a static graph, for which it must see the graph of each batch.

    Evidence: strong, for speed if the host is the limit (PyTorch's CUDA semantics). The trained model is the same.
    """

    # Algorithms that change the shape of batches or the model from batch to batch, record graphs themselves, or read
    # random states during the step.
    conflicts_with = (
        "ActivationCheckpointing",
        "BatchSizeWarmup",
        "Compile",
        "GyroDropout",
        "LayerFreezing",
        "ProgressiveResizing",
        "SelectiveBackprop",
        "SeqLengthWarmup",
        "StochasticDepth",
    )
    runs_after = ("EMA", "LAWA", "SWA", "ScheduleFree")

    def __init__(self) -> None:
        self._recording: Recording | None = None

    def after_load(self, state: State, logger: Logger) -> None:
        if state.device.type not in DEVICES:
            raise ValueError(f"CUDAGraph needs a CUDA device, not {state.device}: leave it out")
        if state.grad_accum > 1 or state.microbatch_size:
            raise ValueError("CUDAGraph cannot accumulate gradients: set grad_accum=1 and microbatch_size=None")
        check_can_join(state, "CUDAGraph", "leave one of them out")
        join_loss(state.unwrapped_model, lambda step, batch: self._run(step, batch, state.unwrapped_model))

    def fit_start(self, state: State, logger: Logger) -> None:
        ddp = state.model
        if isinstance(ddp, DistributedDataParallel) and (ddp.static_graph or ddp.find_unused_parameters):
            raise ValueError("CUDAGraph bypasses DDP's hooks: leave out static_graph and find_unused_parameters")
        if state.unwrapped_model._compiled_call_impl is not None:
            raise ValueError("CUDAGraph cannot record a compiled model: leave out the Trainer's compile")

    def _run(self, step: Step, batch: Any, model: nn.Module) -> tuple[Any, Any]:
        if not torch.is_grad_enabled():
            return step(batch)
        if self._recording is None:
            self._recording = Recording(step, batch, model)
            log.info("CUDAGraph recorded a step; batches of other shapes run without it")
        if layout_of(batch) != self._recording.layout:
            return step(batch)
        return self._recording.run(batch)
