"""A training step whose GPU work is recorded once and then replayed, in fixed memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from runner.algorithms._snapshot import KeptBuffers
from runner.algorithms._whole_step import Step
from runner.device.batch import map_tensors, tensors
from runner.models.loss import total_of

WARM_UP = 3  # passes before the recording, as in torch, so that it does not include memory that libraries allocate once


def record(function: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    """Record the GPU work of a function.

    Args:
        function: reads and writes tensors at fixed addresses.
        pool: memory that recordings share, from `torch.cuda.graph_pool_handle`.

    Returns:
        The result of the function, and a function that makes the GPU compute it again in the same memory.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may read back metrics meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = function()
    return result, graph.replay


class Recording:
    """Forward pass, loss and backward pass for batches of one layout, with inputs and results in fixed memory."""

    def __init__(self, step: Step, batch: Any, model: nn.Module) -> None:
        self.layout = layout_of(batch)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._inputs = map_tensors(batch, torch.clone)
        cuda = [parameter.device for parameter in self.parameters[:1] if parameter.is_cuda]
        buffers = KeptBuffers(model)
        buffers.keep()
        with torch.random.fork_rng(cuda):  # none of these passes is a training step
            stream = torch.cuda.Stream(cuda[0]) if cuda else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._backward(self._forward(step)[2], None)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            pool = torch.cuda.graph_pool_handle() if cuda else None
            (outputs, loss, total), self._replay_forward = record(lambda: self._forward(step), pool)
            self._scale = torch.ones_like(total)
            self._gradients, self._replay_backward = record(lambda: self._backward(total, self._scale), pool)
        buffers.put_back()
        self._outputs = map_tensors(outputs, torch.detach)
        self._total = total.detach()
        self._parts = {name: part.detach() for name, part in loss.items()} if isinstance(loss, dict) else None

    def run(self, batch: Any) -> tuple[Any, Any]:
        """Return the outputs for a batch, valid until the next batch, and its loss, which is differentiable."""
        for fixed, tensor in zip(tensors(self._inputs), tensors(batch), strict=True):
            fixed.copy_(tensor, non_blocking=True)
        total = _Replayed.apply(self, *self.parameters)
        if self._parts is None:
            return self._outputs, total
        return self._outputs, {**{name: part.clone() for name, part in self._parts.items()}, "total": total}

    def forward(self) -> Tensor:
        """Compute the loss; return a copy, because a loss may be read after the next one is computed."""
        self._replay_forward()
        return self._total.clone()

    def backward(self, scale: Tensor) -> list[Tensor | None]:
        """Return the gradients of the loss times a scale, valid until the next batch."""
        self._scale.copy_(scale)
        self._replay_backward()
        # Detached, so that `.grad` needs no copy.
        return [None if gradient is None else gradient.detach() for gradient in self._gradients]

    def _forward(self, step: Step) -> tuple[Any, Any, Tensor]:
        kind = next(tensors(self._inputs)).device.type
        dtype = torch.get_autocast_dtype(kind)
        enabled = torch.is_autocast_enabled(kind)
        # With autocast's cache, replays would use the weights' values at the time of the recording.
        with torch.autocast(kind, dtype, enabled, cache_enabled=False):
            outputs, loss = step(self._inputs)
            return outputs, loss, total_of(loss)

    def _backward(self, total: Tensor, scale: Tensor | None) -> Any:
        with torch.autocast(total.device.type, enabled=False):
            return torch.autograd.grad(total, self.parameters, scale, allow_unused=True)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, *parameters: Tensor) -> Tensor:
        ctx.recording = recording
        return recording.forward()

    # Torch's types of the decorator drop the names of the arguments.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.recording.backward(gradient)


def layout_of(batch: Any) -> Any:
    """Return the nesting of a batch with the shape and type of each tensor."""
    return map_tensors(batch, lambda tensor: (tensor.shape, tensor.dtype))
