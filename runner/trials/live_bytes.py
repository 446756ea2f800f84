"""Counts the bytes of all live tensors, on the CPU too."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Tracks the memory of all tensors that operations of this thread return, until the last reference is gone.

    Memory that an operation uses internally while it runs is not counted.

    Args:
        fake: mode of the fake tensors that count as if they had memory; no others do.

    Attributes:
        live: bytes of live tensors that were made within the `with` block.
        peak: the largest value of `live`; a reader may reset it to `live`.
    """

    def __init__(self, fake: Any = None) -> None:
        super().__init__()
        self.fake = fake
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __enter__(self) -> LiveBytes:
        resize = self._resize = UntypedStorage.resize_  # FSDP frees gathered weights with it, without any operation

        def resize_(storage: Any, size: int) -> Any:
            resize(storage, size)
            self._follow(storage)
            return storage

        UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # a sharded tensor has no memory of its own; its parts are counted
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            is_held = isinstance(value, Tensor) and value.device.type != "meta"
            if is_held and getattr(value, "fake_mode", self.fake) is self.fake:
                self._follow(value.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        if storage._cdata not in self._known:
            self._known[storage._cdata] = 0
            # Torch keeps the storage object as long as its memory, so both end together.
            weakref.finalize(storage, self._end, storage._cdata)
        self._size(storage._cdata, storage.nbytes())

    def _size(self, key: int, size: int) -> None:
        self.live += size - self._known[key]
        self._known[key] = size
        self.peak = max(self.peak, self.live)

    def _end(self, key: int) -> None:
        self.live -= self._known.pop(key)
