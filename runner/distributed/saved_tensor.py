"""Tensors of a sharded checkpoint: locates a rank's part of one, and reads only that."""

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


class Run(NamedTuple):
    """Neighboring indices of a dimension that a rank holds."""

    start: int
    """The first of them in the whole tensor."""
    at: int
    """Where they start in the rank's part."""
    length: int


class Place(NamedTuple):
    """Which indices of a sharded tensor a rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    runs: tuple[tuple[Run, ...], ...]
    """The indices of each dimension. More than one run have weights of several layers in one, such as q, k and v."""
    is_first_copy: bool
    """Whether this rank is the first one that holds this part."""

    def blocks(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield the blocks of the part: the start of each in the full tensor, and its slices in the part."""
        for block in itertools.product(*self.runs):
            yield tuple(one.start for one in block), tuple(slice(one.at, one.at + one.length) for one in block)


def place_of(tensor: Any) -> Place:
    """Return which part of a sharded tensor this rank holds."""
    return _place_in(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


@functools.lru_cache  # the layers of a model have few shapes, and training waits for this
def _place_in(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...]) -> Place:
    from torch.distributed.tensor import Replicate, distribute_tensor

    runs = []
    for dim, size in enumerate(shape):
        index = torch.arange(size, device=mesh.device_type).view([-1 if one == dim else 1 for one in range(len(shape))])
        along = [one if getattr(one, "dim", None) == dim else Replicate() for one in placements]
        held = distribute_tensor(index, mesh, along, src_data_rank=None).to_local().flatten().tolist()
        firsts = [at for at in range(len(held)) if at == 0 or held[at] != held[at - 1] + 1]
        runs.append(tuple(Run(held[at], at, end - at) for at, end in pairwise([*firsts, len(held)])))
    coordinates = zip(placements, mesh.get_coordinate() or (), strict=True)
    is_first = 0 in mesh.mesh and all(number == 0 for one, number in coordinates if one.is_replicate())
    return Place(shape, tuple(runs), is_first)


class Piece(NamedTuple):
    """A part of a tensor in a file: the position at which it begins, its shape, and a slice of safetensors."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    content: Any


class SavedTensor(Tensor):
    """A tensor in the files of several ranks: operations read it in full, and `read_part` reads a part."""

    _pieces: Sequence[Piece]
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, empty: Tensor, pieces: Sequence[Piece]) -> SavedTensor:
        """Return a tensor of the shape and type of an empty one."""
        made = Tensor._make_wrapper_subclass(cls, empty.shape, dtype=empty.dtype)  # type: ignore[attr-defined]
        made._pieces = pieces
        made._whole = None
        return made

    def read_part(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a part of the tensor, reading only that part from the files."""
        found = torch.empty(tuple(shape), dtype=self.dtype)
        read = 0
        for piece in self._pieces:
            first = [*map(max, start, piece.start)]
            last = [min(a + b, c + d) for a, b, c, d in zip(start, shape, piece.start, piece.shape, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                ours, its = (
                    tuple(slice(a - origin, b - origin) for a, b, origin in zip(first, last, origins, strict=True))
                    for origins in (start, piece.start)
                )
                found[ours] = piece.content[its]
                read += found[ours].numel()
        if read != found.numel():
            raise ValueError(f"the saved tensor {tuple(self.shape)} has no part {tuple(shape)} at {tuple(start)}")
        return found

    def read_at(self, place: Place) -> Tensor:
        """Return the part of the tensor that a rank holds."""
        if tuple(self.shape) != place.shape:
            raise ValueError(f"the saved tensor {tuple(self.shape)} is not one of {place.shape}")
        found = torch.empty([sum(run.length for run in runs) for runs in place.runs], dtype=self.dtype)
        for start, block in place.blocks():
            found[block] = self.read_part(start, found[block].shape)
        return found

    def read(self) -> Tensor:
        """Return it whole, as an ordinary tensor."""
        return self.read_part([0] * self.ndim, self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the whole tensor, which is read only once."""
        args, kwargs = tree_map_only(SavedTensor, SavedTensor._kept, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _kept(self) -> Tensor:
        if self._whole is None:
            self._whole = self.read()
        return self._whole


def unsaved(value: Any) -> Any:
    """Return a tensor of a checkpoint in full, as an ordinary tensor; anything else unchanged."""
    return value.read() if isinstance(value, SavedTensor) else value
