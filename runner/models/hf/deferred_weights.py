"""Read pretrained weights only when they are needed: each rank of a sharded model reads only its own parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.deferred import defer
from runner.distributed.saved_tensor import Piece, SavedTensor
from runner.failures.errors import wrong_argument
from runner.libraries.hugging_face import import_hf

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def defer_weights(network: Any, name: str, revision: str | None) -> dict[str, list[Any]]:
    """Defer the parameters of a new network, which are read from safetensors later, and read its buffers now.

    Like transformers, this finds weights with or without the prefix of the base model. Weights that transformers would
    convert, such as those of experts, are reported as missing.

    Args:
        network: a transformers model.
        name: a folder, or a model on the Hub, which is asked only if the model is not in the cache.
        revision: revision of the model on the Hub; None is its main branch.

    Returns:
        The loading report of transformers: `missing_keys`, `mismatched_keys` (tuples that begin with the key) and
        `unexpected_keys`.

    Raises:
        OSError: the files cannot be found or downloaded.
        ValueError: the weights are not in safetensors, or a file is damaged.
    """
    saved = dict(_saved_weights(name, revision))
    tensors: dict[int, tuple[Tensor, list[str]]] = {}
    for key, tensor in network.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (tensor, []))[1].append(key)  # tied weights have several keys
    report: dict[str, list[Any]] = {"missing_keys": [], "mismatched_keys": []}
    used = {spelling for key, _ in network.named_buffers() for spelling in _spellings(key, network)}
    for tensor, keys in tensors.values():
        spellings = [spelling for key in keys for spelling in _spellings(key, network)]
        source = next((spelling for spelling in spellings if spelling in saved), None)
        used |= {*spellings}
        if source is None:
            report["missing_keys"].append(keys[0])
        elif saved[source][1] != tuple(tensor.shape):
            report["mismatched_keys"].append((keys[0],))
        elif isinstance(tensor, nn.Parameter):
            defer(tensor, partial(_read, saved[source][0], source, tensor.shape, tensor.dtype))
        else:
            tensor.copy_(_read(saved[source][0], source, tensor.shape, tensor.dtype).read())
    return {**report, "unexpected_keys": [key for key in saved if key not in used]}


def _spellings(key: str, network: Any) -> tuple[str, ...]:
    """Return a key, the key without the prefix of the base model, and the key with it."""
    prefix = f"{network.base_model_prefix}."
    return key, key.removeprefix(prefix), prefix + key


def _read(file: Path, key: str, shape: torch.Size, dtype: torch.dtype) -> SavedTensor:
    """Return a weight in a file, of which only the parts in use are read."""
    from safetensors import safe_open

    content = safe_open(file, framework="pt").get_slice(key)
    return SavedTensor(torch.empty(shape, dtype=dtype, device="meta"), [Piece((0,) * len(shape), shape, content)])


def _saved_weights(name: str, revision: str | None) -> Iterator[tuple[str, tuple[Path, tuple[int, ...]]]]:
    """Yield the key of each saved weight, the file that has it, and its shape there."""
    from safetensors import SafetensorError, safe_open

    for file in _files(name, revision):
        try:
            with safe_open(file, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118 - not a dict
                    yield key, (file, tuple(weights.get_slice(key).get_shape()))
        except SafetensorError as error:
            raise wrong_argument("name", name, f"{file.name} is not a safetensors file ({error})") from None


def _files(name: str, revision: str | None) -> list[Path]:
    hub = import_hf("transformers.utils.hub")
    options = {"revision": revision}

    def find(file: str) -> str | None:
        missing = {"_raise_exceptions_for_missing_entries": False}
        with suppress(OSError):
            if path := hub.cached_file(name, file, **options, **missing, local_files_only=True):
                return path
        return None if Path(name).is_dir() else hub.cached_file(name, file, **options, **missing)

    if whole := find(WEIGHTS):
        return [Path(whole)]
    if index := find(INDEX):
        return [*map(Path, hub.get_checkpoint_shard_files(name, index, **options)[0])]
    raise wrong_argument(
        "name", name, f"has no {WEIGHTS}, which init_weights='by_name' reads; convert it, or set in_order"
    )
