"""Process-wide torch settings that decide the last bits of results, set for a run and restored afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def set_numerics(deterministic: bool, tf32: bool = False) -> Callable[[], None]:
    """Change torch's settings as a run requires, and return a function that restores them.

    Args:
        deterministic: whether torch refuses operations that may differ between identical runs.
        tf32: whether matrix products of float32 on CUDA are computed in TF32.
    """
    # torch reads the variable once per process, before its first matrix product. It is always set, because a later
    # run in this process may be deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    undo: list[Callable[[], None]] = []
    if deterministic:
        undo.append(_set_determinism())
    if tf32:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        undo.append(lambda: torch.set_float32_matmul_precision(precision))

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def _set_determinism() -> Callable[[], None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False

    def restore() -> None:
        torch.use_deterministic_algorithms(enabled, warn_only=warns_only)
        torch.backends.cudnn.benchmark = benchmark

    return restore
