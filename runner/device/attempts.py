"""Attempts that may run out of memory: when to expect it, how to recognize it, and how to undo the failed attempt."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NO_MEMORY = re.compile(r"CU(BLAS|DNN)_STATUS_\w*ALLOC|CUBLAS_STATUS_NOT_INITIALIZED|CUDA error: out of memory")
CANNOT_RETRY = (
    "microbatches of {size} samples had fit a batch of these shapes, so its metrics and buffers were not copied, and "
    "it cannot be repeated; resume the run with trainer.microbatch_size={half} --allow-changes "
    "trainer.microbatch_size"
)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch's allocator, cuBLAS or cuDNN says that the device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or NO_MEMORY.search(str(error)) is not None


def shapes_of(batch: Any) -> tuple[Any, ...] | None:
    """Return the shapes of a batch's tensors, nested like the batch; None if shapes do not determine the batch's size.

    They do not if a tensor is nested, or if an object with a method `to` is not a mapping, tuple or list of tensors.
    """
    if isinstance(batch, Tensor):
        return None if batch.is_nested else (batch.shape,)
    if isinstance(batch, Mapping | tuple | list):
        parts = [shapes_of(item) for item in (batch.values() if isinstance(batch, Mapping) else batch)]
        return None if None in parts else tuple(parts)
    return None if hasattr(batch, "to") else ()


def save_for_retry(model: nn.Module, metrics: Mapping[str, Any]) -> Callable[[], None]:
    """Return a function that restores, as often as needed, a model's buffers and the states of metrics.

    Microbatches of a failed attempt must not enter running statistics or metrics. A deep copy of the metrics would take
    50 times as long.
    """
    buffers = [*model.buffers()]
    values = torch._foreach_clone(buffers) if buffers else ()  # pyright: ignore[reportPrivateImportUsage]
    parts = [part for metric in metrics.values() for part in metric.modules() if hasattr(part, "metric_state")]
    states = [_copy_states(part.metric_state) | {"_update_count": part._update_count} for part in parts]

    def restore() -> None:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        for part, state in zip(parts, states, strict=True):
            for name, value in _copy_states(state).items():
                setattr(part, name, value)

    return restore


def _copy_states(states: Mapping[str, Any]) -> dict[str, Any]:
    # Metrics append to their lists and add to their tensors in place; tensors within lists never change.
    return {name: state.clone() if isinstance(state, Tensor) else copy.copy(state) for name, state in states.items()}
