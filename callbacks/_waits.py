"""Counts how often code waits for the device, as far as torch's interface shows it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

READS = {"item", "tolist", "numpy", "cpu", "nonzero", "equal", "__array__", "__bool__", "__float__", "__int__"}


class Waits(TorchFunctionMode):
    """Within the `with` block, counts in `count` the calls in this thread that read values or copy them to the host.

    On the CPU, where nothing is waited for, it counts what would wait on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        on_device = bool(args) and isinstance(args[0], Tensor) and not args[0].is_cpu
        moves = name == "to" and on_device and result.is_cpu
        self.count += (name in READS and bool(args) and isinstance(args[0], Tensor)) or moves
        return result
