"""Tensors of a sharded checkpoint: where a rank's part of one lies, and how it reads no more than that."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Place(NamedTuple):
    """Where a rank's part of a sharded tensor lies."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    starts: tuple[tuple[int, ...], ...]
    """Position in the whole tensor at which each piece of the part begins: one, but of queries, keys and values in one
    weight, whose layer ranks split, one of each."""
    rows: tuple[int, ...]
    """Length of each piece along dimension 0."""
    is_first_copy: bool
    """Whether this rank is the first of those that hold the same part."""


def place_of(tensor: Any) -> Place:
    """Return where this rank's part of a sharded tensor lies."""
    return _place_in(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


@functools.lru_cache  # the layers of a model have few shapes, and training waits for this
def _place_in(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> Place:
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, (_, *columns) = compute_local_shape_and_global_offset(shape, mesh, placements)
    by_row = [Replicate() if getattr(one, "dim", 0) else one for one in placements]
    rows = distribute_tensor(torch.arange(shape[0], device=mesh.device_type), mesh, by_row, src_data_rank=None)
    kept: list[int] = rows.to_local().tolist()
    firsts = [index for index, row in enumerate(kept) if index == 0 or row != kept[index - 1] + 1]
    lengths = [end - first for first, end in zip(firsts, [*firsts[1:], len(kept)], strict=True)]
    at = zip(placements, mesh.get_coordinate(), strict=True)
    is_first = 0 in mesh.mesh and all(number == 0 for one, number in at if one.is_replicate())
    return Place(shape, tuple((kept[first], *columns) for first in firsts), tuple(lengths), is_first)


class Piece(NamedTuple):
    """A part of a tensor in a file: the position at which it begins, its shape, and a slice of safetensors."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    content: Any


class SavedTensor(Tensor):
    """A tensor in the files of several ranks: what computes with it reads it whole, and `read_part` a part of it."""

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
        """Return a part of it, reading no more than that from the files.

        Args:
            start: position in the whole tensor at which the part begins.
            shape: shape of the part.

        Raises:
            ValueError: the part is not within the tensor.
        """
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

    def read_place(self, place: Place, shape: Sequence[int]) -> Tensor:
        """Return a rank's part of it, of a given shape, reading no more than that from the files."""
        pieces = [
            self.read_part(start, (rows, *shape[1:])) for start, rows in zip(place.starts, place.rows, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0, *shape[1:], dtype=self.dtype), *pieces])

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
    """Return a tensor of a checkpoint whole, as an ordinary one; anything else as it is."""
    return value.read() if isinstance(value, SavedTensor) else value
