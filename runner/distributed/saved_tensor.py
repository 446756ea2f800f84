"""Tensors of a sharded checkpoint, from which a rank reads only its own part."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class IndexRange(NamedTuple):
    """Consecutive indices of a dimension that a rank holds."""

    start: int
    """First index in the whole tensor."""
    at: int
    """First index in the rank's part."""
    length: int


class ShardLayout(NamedTuple):
    """Which indices of a sharded tensor a rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    ranges: tuple[tuple[IndexRange, ...], ...]
    """The indices of each dimension; several if one weight holds several layers, such as q, k and v."""
    is_first_copy: bool
    """Whether this rank is the first of those that hold this part."""

    def blocks(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield the blocks of the part: the start of each in the whole tensor, and its slices in the part."""
        for block in itertools.product(*self.ranges):
            slices = (slice(indices.at, indices.at + indices.length) for indices in block)
            yield tuple(indices.start for indices in block), tuple(slices)


def layout_of(tensor: Any) -> ShardLayout:
    """Return which part of a sharded tensor this rank holds."""
    return _layout_in(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


@functools.lru_cache  # a model's layers have few distinct shapes, and training waits for this
def _layout_in(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...]) -> ShardLayout:
    from torch.distributed.tensor import Replicate, distribute_tensor

    ranges = []
    for dim, size in enumerate(shape):
        index_shape = [-1 if axis == dim else 1 for axis in range(len(shape))]
        index = torch.arange(size, device=mesh.device_type).view(index_shape)
        along = [placement if getattr(placement, "dim", None) == dim else Replicate() for placement in placements]
        indices = distribute_tensor(index, mesh, along, src_data_rank=None).to_local().flatten().tolist()
        starts = [at for at in range(len(indices)) if at == 0 or indices[at] != indices[at - 1] + 1]
        ranges.append(tuple(IndexRange(indices[at], at, end - at) for at, end in pairwise([*starts, len(indices)])))
    coordinates = zip(placements, mesh.get_coordinate() or (), strict=True)
    is_first = 0 in mesh.mesh and all(number == 0 for placement, number in coordinates if placement.is_replicate())
    return ShardLayout(shape, tuple(ranges), is_first)


class Piece(NamedTuple):
    """A part of a tensor in a file: its start in the tensor, its shape, and a slice of safetensors."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    content: Any


class SavedTensor(Tensor):
    """A tensor in the files of several ranks: an operation reads all of it, and `read_part` only a part."""

    _pieces: Sequence[Piece]
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, empty: Tensor, pieces: Sequence[Piece]) -> SavedTensor:
        """Return a saved tensor with the shape and type of an empty one."""
        tensor = Tensor._make_wrapper_subclass(cls, empty.shape, dtype=empty.dtype)  # type: ignore[attr-defined]
        tensor._pieces = pieces
        tensor._whole = None
        return tensor

    def read_part(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a part of the tensor, reading only that part from the files."""
        part = torch.empty(tuple(shape), dtype=self.dtype)
        read = 0
        for piece in self._pieces:
            first = [*map(max, start, piece.start)]
            last = [min(a + b, c + d) for a, b, c, d in zip(start, shape, piece.start, piece.shape, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                target, source = (
                    tuple(slice(a - origin, b - origin) for a, b, origin in zip(first, last, origins, strict=True))
                    for origins in (start, piece.start)
                )
                part[target] = piece.content[source]
                read += part[target].numel()
        if read != part.numel():
            raise ValueError(f"the saved tensor {tuple(self.shape)} has no part {tuple(shape)} at {tuple(start)}")
        return part

    def read_shard(self, layout: ShardLayout) -> Tensor:
        """Return the part of the tensor that a rank holds."""
        if tuple(self.shape) != layout.shape:
            raise ValueError(f"the saved tensor has shape {tuple(self.shape)} instead of {layout.shape}")
        part = torch.empty([sum(indices.length for indices in ranges) for ranges in layout.ranges], dtype=self.dtype)
        for start, block in layout.blocks():
            part[block] = self.read_part(start, part[block].shape)
        return part

    def read(self) -> Tensor:
        """Return the whole tensor as an ordinary one."""
        return self.read_part([0] * self.ndim, self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the whole tensor, reading it only once."""
        args, kwargs = tree_map_only(SavedTensor, SavedTensor._cached, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _cached(self) -> Tensor:
        if self._whole is None:
            self._whole = self.read()
        return self._whole


def as_plain(value: Any) -> Any:
    """Return a saved tensor as a whole, ordinary tensor; anything else unchanged."""
    return value.read() if isinstance(value, SavedTensor) else value
