"""Number formats of a run: where autocast applies, whether gradients are scaled, what weights are cast to."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from runner.batch import map_tensors


class Precision(StrEnum):
    """What forward passes compute in.

    `fp32`; `amp_bf16` and `amp_fp16` (autocast, the latter with loss scaling); `bf16` (weights and inputs too);
    `amp_fp8` (layers of Transformer Engine in 8 bits, the rest as in `amp_bf16`).
    """

    FP32 = "fp32"
    AMP_BF16 = "amp_bf16"
    AMP_FP16 = "amp_fp16"
    BF16 = "bf16"
    AMP_FP8 = "amp_fp8"

    @classmethod
    def _missing_(cls, value: object) -> Precision:
        near = difflib.get_close_matches(str(value), list(cls), n=1, cutoff=0.0)[0]
        raise ValueError(f"precision={value!r}: must be one of {[*map(str, cls)]}; did you mean {str(near)!r}?")

    def check(self, device: torch.device) -> None:
        """Raise where a device cannot do it, and warn where it is slow.

        Raises:
            ValueError: amp_fp8 without a CUDA device of compute capability 8.9 and Transformer Engine.
        """
        if self is Precision.AMP_FP8:
            if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
                raise ValueError(
                    f"precision='amp_fp8' needs a CUDA device of capability 8.9 or more, not {device}; use 'amp_bf16'"
                )
            try:
                import transformer_engine.pytorch  # noqa: F401  # pyright: ignore[reportMissingImports]
            except ImportError:
                raise ValueError("precision='amp_fp8' needs transformer-engine; or use 'amp_bf16'") from None
        if device.type == "cpu" and self in (Precision.AMP_BF16, Precision.BF16) and not _fast_bf16_on_cpu():
            warnings.warn(
                f"precision={self.value!r}: this CPU has no bfloat16 unit; expect it to be about ten times slower",
                stacklevel=3,
            )

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """What weights and floating inputs are cast to, or None to leave them."""
        return torch.bfloat16 if self is Precision.BF16 else None

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return the loss scaler of amp_fp16, None otherwise."""
        return torch.amp.GradScaler(device.type) if self is Precision.AMP_FP16 else None

    def autocast(self, device: torch.device) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator for what runs in forward passes; the identity where there is nothing to cast."""
        if self is Precision.AMP_BF16:
            return torch.autocast(device.type, torch.bfloat16)
        if self is Precision.AMP_FP16:
            return torch.autocast(device.type, torch.float16)
        if self is Precision.AMP_FP8:
            import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

            in_bf16 = torch.autocast(device.type, torch.bfloat16)  # what Transformer Engine does not compute
            return lambda function: in_bf16(te.fp8_autocast()(function))
        return lambda function: function

    def cast(self, batch: Any) -> Any:
        """Return a batch whose floating tensors have `weight_dtype`; the batch itself where that is None."""
        dtype = self.weight_dtype
        if dtype is None:
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _fast_bf16_on_cpu() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
