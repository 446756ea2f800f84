"""Hash nested values with tensors, which are copied to the host in batches."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from runner.distributed.sharding import is_sharded, whole

SMALL = 1 << 20
"""Largest tensor, in bytes, that is copied to the host together with others."""
MOST = 1 << 24
"""Total bytes of collected tensors above which they are copied to the host."""

Kind = tuple[torch.device, torch.dtype]


@torch.no_grad()
def digest(value: Any) -> str:
    """Return a hash of 32 hexadecimal digits for tensors, numbers, strings, lists and dicts, nested to any depth.

    Tensors are hashed by shape, dtype and bits, floats by their bits (0.0 is not -0.0), and dicts regardless of their
    order. 1, 1.0 and True differ; a list equals a tuple. Tensors on an accelerator are copied to the host.
    """
    content = _Hash()
    _add(content, value)
    return content.hexdigest()


class _Hash:
    """A hash of bytes and tensors. Small tensors are collected and copied to the host in one buffer for each dtype."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._order: list[bytes | tuple[Kind, int]] = []  # bytes, or a tensor's kind and number of bytes
        self._tensors: dict[Kind, list[Tensor]] = {}
        self._size = 0
        self.add: Callable[[bytes], None] = self._order.append

    def add_tensor(self, tensor: Tensor) -> None:
        """Add the bits of a tensor that is neither sharded nor sparse."""
        size = tensor.nbytes
        if size > SMALL:
            self._flush()
            self._hash.update(_bytes_of(tensor.cpu().reshape(-1)))  # an intended host-device sync
            return
        kind = tensor.device, tensor.dtype
        self._order.append((kind, size))
        self._tensors.setdefault(kind, []).append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
        self._size += size
        if self._size > MOST:
            self._flush()

    def hexdigest(self) -> str:
        """Return the hash of everything that was added."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        # The intended host-device sync: one for each dtype on each device.
        buffers = {kind: BytesIO(_bytes_of(torch.cat(tensors).cpu())) for kind, tensors in self._tensors.items()}
        parts = (part if isinstance(part, bytes) else buffers[part[0]].read(part[1]) for part in self._order)
        self._hash.update(b"".join(parts))
        self._order.clear()
        self._tensors.clear()
        self._size = 0


def _bytes_of(flat: Tensor) -> memoryview:
    """Return the bytes of a one-dimensional tensor on the host."""
    return flat.resolve_conj().view(torch.uint8).numpy().data


def _add(content: _Hash, value: Any) -> None:
    """Add a value to a hash: its type and size precede its bits, so that different values never add the same bytes."""
    if isinstance(value, Tensor):
        _add_tensor(content, value)
    elif value is None or isinstance(value, bool | int):
        content.add(f"{type(value).__name__} {value};".encode())
    elif isinstance(value, float):
        content.add(b"float " + struct.pack("<d", value))
    elif isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        content.add(f"{type(value).__name__} {len(data)};".encode() + data)
    elif isinstance(value, Mapping):
        content.add(f"dict {len(value)};".encode())
        for key in sorted(value, key=repr):
            _add(content, key)
            _add(content, value[key])
    elif isinstance(value, Sequence):
        content.add(f"list {len(value)};".encode())
        for item in value:
            _add(content, item)
    else:
        raise TypeError(f"a {type(value).__name__} has no digest: state is tensors, numbers, strings, lists and dicts")


def _add_tensor(content: _Hash, tensor: Tensor) -> None:
    if is_sharded(tensor):
        tensor = whole(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_sparse().coalesce()
        content.add(f"sparse {tuple(tensor.shape)};".encode())
        _add(content, [tensor.indices(), tensor.values()])
        return
    content.add(_header(tensor.dtype, tensor.shape))
    content.add_tensor(tensor)


@functools.lru_cache(10_000)
def _header(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"tensor {dtype} {tuple(shape)};".encode()
