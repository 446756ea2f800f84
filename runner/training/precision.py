"""The number formats of a run: autocast, loss scaling, and the dtype of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from runner.device.batch import map_tensors
from runner.failures.checks import check_one_of, refuse_if


class Precision(StrEnum):
    """The precision of forward passes.

    - `fp32`: torch still lets convolutions on CUDA use TF32.
    - `tf32`: matrix products use TF32 too. They are several times faster, with 10 bits of mantissa instead of 23.
    - `amp_bf16`, `amp_fp16`: autocast, the latter with loss scaling.
    - `bf16`: weights and inputs are bfloat16 as well.

    For 8 bits, use the algorithm `Float8`.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    AMP_BF16 = "amp_bf16"
    AMP_FP16 = "amp_fp16"
    BF16 = "bf16"

    @classmethod
    def _missing_(cls, value: object) -> None:
        refuse_if("fp8" in str(value).lower(), "precision", value, "choose 'amp_bf16', and add the algorithm Float8")
        check_one_of("precision", value, [*map(str, cls)])

    def check(self, device: torch.device) -> None:
        """Check that a device supports this precision, and warn if it is slow there.

        Raises:
            ValueError: tf32 was chosen, and the device does not support it.
        """
        if self is Precision.TF32 and (device.type != "cuda" or not torch.cuda.is_tf32_supported()):
            raise ValueError(
                f"precision='tf32' needs a CUDA device of capability 8.0 or more, not {device}; use 'fp32'"
            )
        if device.type == "cpu" and self in (Precision.AMP_BF16, Precision.BF16) and not _fast_bf16_on_cpu():
            warnings.warn(
                f"precision={self.value!r}: this CPU has no bfloat16 unit; expect it to be about ten times slower",
                stacklevel=3,
            )

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype to which weights and floating-point inputs are cast; None leaves them as they are."""
        return torch.bfloat16 if self is Precision.BF16 else None

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return the loss scaler for amp_fp16, or None for any other precision."""
        return torch.amp.GradScaler(device.type) if self is Precision.AMP_FP16 else None

    def autocast(self, device: torch.device) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator for the functions of a forward pass; without autocast, it returns them unchanged."""
        if self is Precision.AMP_BF16:
            return torch.autocast(device.type, torch.bfloat16)
        if self is Precision.AMP_FP16:
            return torch.autocast(device.type, torch.float16)
        return lambda function: function

    def cast(self, batch: Any) -> Any:
        """Return a batch with its floating-point tensors cast to `weight_dtype`; the batch itself if that is None."""
        dtype = self.weight_dtype
        if dtype is None:
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _fast_bf16_on_cpu() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
