"""Counts the bytes of tensors that live at once, on the CPU too."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows the memory of all tensors that operations of this thread return, until the last reference is gone.

    What an operation takes for itself while it runs is not seen.

    Attributes:
        live: bytes that live now, of what was made within the `with` block.
        peak: the most that lived at once; whoever reads it may set it back to `live`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self._follow(one.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            # Torch keeps the object of a memory as long as the memory, so its end is that of the memory.
            weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
