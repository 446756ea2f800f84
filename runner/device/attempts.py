"""Attempts that may run out of memory: when to expect it, how to tell, and how to take back what they have counted."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NO_MEMORY = re.compile(r"CU(BLAS|DNN)_STATUS_\w*ALLOC|CUBLAS_STATUS_NOT_INITIALIZED|CUDA error: out of memory")
NOT_AGAIN = (
    "microbatches of {size} samples had fit a batch of these shapes, so its metrics and buffers were not copied, and "
    "it cannot be done again; resume the run with trainer.microbatch_size={half} --allow-changes "
    "trainer.microbatch_size"
)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that the device has no memory left: torch's allocator, cuBLAS or cuDNN."""
    return isinstance(error, torch.OutOfMemoryError) or NO_MEMORY.search(str(error)) is not None


def shapes_of(batch: Any) -> tuple[Any, ...] | None:
    """Return the shapes of a batch's tensors, nested as it is; None where equal shapes may be of different sizes.

    That is so where a tensor is nested, or an object with a method `to` is no mapping, tuple or list of tensors.
    """
    if isinstance(batch, Tensor):
        return None if batch.is_nested else (batch.shape,)
    if isinstance(batch, Mapping | tuple | list):
        parts = [shapes_of(one) for one in (batch.values() if isinstance(batch, Mapping) else batch)]
        return None if None in parts else tuple(parts)
    return None if hasattr(batch, "to") else ()


def remember(model: nn.Module, metrics: Mapping[str, Any]) -> Callable[[], None]:
    """Return a function that puts back, as often as needed, a model's buffers and what metrics have accumulated.

    Running statistics must not see the microbatches of an attempt that failed, nor metrics count them. A deep copy of
    metrics would take 50 times as long.
    """
    buffers = [*model.buffers()]
    values = torch._foreach_clone(buffers) if buffers else ()  # pyright: ignore[reportPrivateImportUsage]
    parts = [part for metric in metrics.values() for part in metric.modules() if hasattr(part, "metric_state")]
    states = [_copied(part.metric_state) | {"_update_count": part._update_count} for part in parts]

    def restore() -> None:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        for part, state in zip(parts, states, strict=True):
            for name, value in _copied(state).items():
                setattr(part, name, value)

    return restore


def _copied(states: Mapping[str, Any]) -> dict[str, Any]:
    # Metrics append to the lists among their states, and add to the tensors in place; those in lists never change.
    return {name: one.clone() if isinstance(one, Tensor) else copy.copy(one) for name, one in states.items()}
