"""Sharded checkpoints: each rank writes its parts of weights and optimizer states to its own file.

Beside `model.pt` and `state.pt` there is a safetensors file for each rank that has parts. In the `.pt` files, a tensor
of the same shape and dtype on the meta device stands in for each sharded tensor. Each of its parts is named after the
path of the tensor in the file and the index at which the part begins: `model.pt['module.head.weight']@128,0`. Readers
do not need to know which rank wrote a part, so any number of ranks may read them, in any layout.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.checkpoints.manifest import Manifest
from runner.core.state import State
from runner.device.batch import tensors
from runner.distributed.collectives import broadcast_object
from runner.distributed.saved_tensor import Piece, SavedTensor, as_plain
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
"""Types that can be sharded, with their names in safetensors."""


def should_shard(state: State, sharded: bool | None) -> bool:
    """Return whether to write a sharded checkpoint. All ranks.

    With `sharded=None`, a sharded model's checkpoint is sharded if all weights and optimizer states would take more
    than half of the free memory of rank 0's machine.
    """
    if sharded is not None or not is_sharded(state.unwrapped_model):
        return bool(sharded) and is_sharded(state.unwrapped_model)
    import psutil

    content = [*state.unwrapped_model.parameters(), *(optimizer.state_dict() for optimizer in state.optimizers)]
    size = sum(tensor.nbytes for tensor in tensors(content))  # a sharded tensor counts as a whole
    return broadcast_object(2 * size > psutil.virtual_memory().available)


# Writing


def split(snapshot: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a snapshot with empty tensors instead of sharded ones, and this rank's parts by name."""
    empty: dict[int, Tensor] = {}
    parts: dict[str, Tensor] = {}

    def take_parts(name: str, tensor: Tensor) -> Tensor:
        layout = snapshot["layouts"].get(id(tensor))
        if layout is None:
            return tensor
        if id(tensor) not in empty:
            empty[id(tensor)] = torch.empty(layout.shape, dtype=tensor.dtype, device="meta")
            for start, block in layout.blocks() if layout.is_first_copy else ():
                parts[f"{name}@{','.join(map(str, start))}"] = tensor[block]
        return empty[id(tensor)]

    files = {name: _map_named(content, take_parts, name) for name, content in snapshot.items() if name.endswith(".pt")}
    return {**snapshot, **files}, parts


def write_safetensors(write: Callable[[Any], Any], content: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors one by one in the safetensors format; the library's own function would first copy them all.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in content.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write(struct.pack("<Q", len(text)) + text)
    for tensor in content.values():
        write(as_plain(tensor).contiguous().view(-1).view(torch.uint8).numpy())


# Reading


def join(content: Any, name: str, folder: Path, manifest: Manifest) -> Any:
    """Return the content of a checkpoint's file with its sharded tensors instead of empty ones.

    Raises:
        UnreadableCheckpoint: the parts of a tensor do not make up the whole, or are from another checkpoint.
    """
    pieces: dict[str, list[Piece]] = {}
    types: dict[str, set[str]] = {}
    for owner, piece, dtype in _read_pieces(folder, manifest, f"{name}["):
        pieces.setdefault(owner, []).append(piece)
        types.setdefault(owner, set()).add(dtype)
    joined: dict[int, SavedTensor] = {}

    def fill(path: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in joined:
            own_pieces = pieces.get(path, [])
            if types.get(path, set()) - {DTYPES.get(tensor.dtype)} or not _is_whole(tensor.shape, own_pieces):
                raise UnreadableCheckpoint(
                    f"the shards of {path} are not a whole tensor {tuple(tensor.shape)}, {tensor.dtype}"
                )
            joined[id(tensor)] = SavedTensor(tensor, own_pieces)
        return joined[id(tensor)]

    return _map_named(content, fill, name)


def _read_pieces(folder: Path, manifest: Manifest, prefix: str) -> Iterator[tuple[str, Piece, str]]:
    """Yield the parts of tensors whose path has a prefix: the tensor's path, the part, and its type."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(name for name in manifest.files if name.endswith(SUFFIX)):
        try:
            shard = safe_open(folder / file, framework="pt")  # stays mapped as long as a piece of it is in use
            if (shard.metadata() or {}).get("save") != manifest.save:
                raise UnreadableCheckpoint(f"{file} belongs to another checkpoint")
            for key in shard.keys():  # noqa: SIM118 - not a dict
                if (match := NAME.fullmatch(key)) is None:
                    raise UnreadableCheckpoint(f"{file} contains {key!r}, which is not the name of a part")
                if match[1].startswith(prefix):
                    content = shard.get_slice(key)
                    start = tuple(map(int, match[2].split(","))) if match[2] else ()
                    yield match[1], Piece(start, tuple(content.get_shape()), content), content.get_dtype()
        except SafetensorError as error:
            raise UnreadableCheckpoint(f"{file} is not a safetensors file ({error})") from None


def _is_whole(shape: Sequence[int], pieces: Sequence[Piece]) -> bool:
    """Return whether parts cover a tensor completely: all lie inside it, none overlap, and their sizes add up."""
    are_inside = all(
        len(shape) == len(piece.start) == len(piece.shape)
        and all(0 <= a <= a + b <= whole for a, b, whole in zip(piece.start, piece.shape, shape, strict=True))
        for piece in pieces
    )
    return are_inside and sum(prod(piece.shape) for piece in pieces) == prod(shape) and not _overlap(pieces)


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Return whether any two pieces share an element."""
    ordered = sorted(pieces, key=lambda piece: piece.start)
    for index, piece in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.start[0] >= piece.start[0] + piece.shape[0]:
                break  # all later pieces begin beyond this one
            if all(a < c + d and c < a + b for a, b, c, d in zip(*piece[:2], *other[:2], strict=True)):
                return True
    return False


def _map_named(value: Any, function: Callable[[str, Tensor], Any], name: str) -> Any:
    """Return nested dicts and lists with `function` applied to each tensor and its path, such as `model.pt['a'][0]`."""
    if isinstance(value, Tensor):
        return function(name, value)
    if isinstance(value, dict):
        return {key: _map_named(item, function, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_named(item, function, f"{name}[{index}]") for index, item in enumerate(value))
    return value
