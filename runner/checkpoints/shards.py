"""Sharded checkpoints: each rank writes its parts of weights and optimizer states to its own file.

Beside `model.pt` and `state.pt` there is a safetensors file for each rank that has parts. In the `.pt` files a sharded
tensor is an empty one on the meta device, which has its shape and type. Its parts are named after the place where it
stands and the position at which they begin: `model.pt['module.head.weight']@128,0`. Which rank wrote a part does not
matter to those who read it, so any number of ranks may, in any layout.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.checkpoints.manifest import Manifest
from runner.core.state import State
from runner.device.batch import tensors
from runner.distributed.collectives import broadcast_object
from runner.distributed.saved_tensor import Piece, SavedTensor, unsaved
from runner.distributed.sharding import is_sharded
from runner.failures.errors import UnreadableCheckpoint

SUFFIX = ".safetensors"
NAME = re.compile(r"(.+)@((?:\d+(?:,\d+)*)?)", re.DOTALL)
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types that can be sharded, and what safetensors calls them."""


def should_shard(state: State, wanted: bool | None) -> bool:
    """Return whether a checkpoint is to be sharded. All ranks.

    Unless the user decides, it is sharded if all weights and optimizer states would take more than half of the memory
    that is free on rank 0's machine.
    """
    if wanted is not None or not is_sharded(state.unwrapped_model):
        return bool(wanted) and is_sharded(state.unwrapped_model)
    import psutil

    held = [*state.unwrapped_model.parameters(), *(one.state_dict() for one in state.optimizers)]
    size = sum(one.nbytes for one in tensors(held))  # of a sharded tensor, that of the whole
    return broadcast_object(2 * size > psutil.virtual_memory().available)


# Writing


def split(snapshot: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of a snapshot's files with empty tensors for sharded ones, and this rank's parts by name."""
    empty: dict[int, Tensor] = {}
    parts: dict[str, Tensor] = {}

    def cut(name: str, tensor: Tensor) -> Tensor:
        place = snapshot["places"].get(id(tensor))
        if place is None:
            return tensor
        if id(tensor) not in empty:
            empty[id(tensor)] = torch.empty(place.shape, dtype=tensor.dtype, device="meta")
            for start, block in place.blocks() if place.is_first_copy else ():
                parts[f"{name}@{','.join(map(str, start))}"] = tensor[block]
        return empty[id(tensor)]

    files = {name: _map_named(content, cut, name) for name, content in snapshot.items() if name.endswith(".pt")}
    return {**snapshot, **files}, parts


def write_safetensors(write: Callable[[Any], Any], content: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors in the format of safetensors, one by one; its own function would copy all of them before.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, one in content.items():
        start, end = end, end + one.nbytes
        header[name] = {"dtype": DTYPES[one.dtype], "shape": [*one.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write(struct.pack("<Q", len(text)) + text)
    for one in content.values():
        write(unsaved(one).contiguous().view(-1).view(torch.uint8).numpy())


# Reading


def join(content: Any, name: str, folder: Path, manifest: Manifest) -> Any:
    """Return the content of a file of a checkpoint with its sharded tensors in the place of empty ones.

    Raises:
        UnreadableCheckpoint: the parts of a tensor are not those of the whole, or are from another checkpoint.
    """
    pieces: dict[str, list[Piece]] = {}
    types: dict[str, set[str]] = {}
    for owner, piece, dtype in _read_pieces(folder, manifest, f"{name}["):
        pieces.setdefault(owner, []).append(piece)
        types.setdefault(owner, set()).add(dtype)
    made: dict[int, SavedTensor] = {}

    def fill(place: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            found = pieces.get(place, [])
            if types.get(place, set()) - {DTYPES.get(tensor.dtype)} or not _is_whole(tensor.shape, found):
                raise UnreadableCheckpoint(
                    f"the shards of {place} are not a whole tensor {tuple(tensor.shape)}, {tensor.dtype}"
                )
            made[id(tensor)] = SavedTensor(tensor, found)
        return made[id(tensor)]

    return _map_named(content, fill, name)


def _read_pieces(folder: Path, manifest: Manifest, prefix: str) -> Iterator[tuple[str, Piece, str]]:
    """Yield the parts in a checkpoint's files with a prefix: the tensor's name, the part, and its type."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(one for one in manifest.files if one.endswith(SUFFIX)):
        try:
            opened = safe_open(folder / file, framework="pt")  # its memory stays mapped as long as a piece is used
            if (opened.metadata() or {}).get("save") != manifest.save:
                raise UnreadableCheckpoint(f"{file} belongs to another checkpoint")
            for key in opened.keys():  # noqa: SIM118 - not a dict
                if (named := NAME.fullmatch(key)) is None:
                    raise UnreadableCheckpoint(f"{file} contains {key!r}, which is not the name of a part")
                if named[1].startswith(prefix):
                    content = opened.get_slice(key)
                    start = tuple(map(int, named[2].split(","))) if named[2] else ()
                    yield named[1], Piece(start, tuple(content.get_shape()), content), content.get_dtype()
        except SafetensorError as error:
            raise UnreadableCheckpoint(f"{file} is not a safetensors file ({error})") from None


def _is_whole(shape: Sequence[int], pieces: Sequence[Piece]) -> bool:
    """Return whether parts cover a tensor completely: all lie inside it, none overlap, and their sizes add up."""
    inside = all(
        len(shape) == len(one.start) == len(one.shape)
        and all(0 <= a <= a + b <= whole for a, b, whole in zip(one.start, one.shape, shape, strict=True))
        for one in pieces
    )
    return inside and sum(prod(one.shape) for one in pieces) == prod(shape) and not _overlap(pieces)


def _overlap(pieces: Sequence[Piece]) -> bool:
    ordered = sorted(pieces, key=lambda one: one.start)
    for index, one in enumerate(ordered):
        for other in takewhile(lambda it: it.start[0] < one.start[0] + one.shape[0], ordered[index + 1 :]):  # noqa: B023
            if all(a < c + d and c < a + b for a, b, c, d in zip(*one[:2], *other[:2], strict=True)):
                return True
    return False


def _map_named(value: Any, function: Callable[[str, Tensor], Any], name: str) -> Any:
    """Return nested dicts and lists with `function` applied to the names, such as `model.pt['a'][0]`, and tensors."""
    if isinstance(value, Tensor):
        return function(name, value)
    if isinstance(value, dict):
        return {key: _map_named(one, function, f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_named(one, function, f"{name}[{index}]") for index, one in enumerate(value))
    return value
