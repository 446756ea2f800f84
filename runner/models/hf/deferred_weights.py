"""Pretrained weights that are read when they are needed: of a sharded model, each rank reads only its own parts."""

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
    """Register that the parameters of a network are read from safetensors later, and read its buffers now.

    As transformers does, this finds a weight also where a file leaves out the prefix of the base model, or where only
    the file has one. Weights that transformers would convert, such as those of experts, are missing. The network is
    new. The name is that of a folder, or of a model on the Hub, which is asked only if the model is not in the cache;
    without a revision it is the main branch.

    Returns:
        What transformers reports after loading: `missing_keys`, `mismatched_keys` (tuples that begin with the key) and
        `unexpected_keys`.

    Raises:
        OSError: the files cannot be found or downloaded.
        ValueError: the weights are not in safetensors, or a file is damaged.
    """
    saved = dict(_saved_weights(name, revision))
    tensors: dict[int, tuple[Tensor, list[str]]] = {}
    for key, one in network.state_dict(keep_vars=True).items():
        tensors.setdefault(id(one), (one, []))[1].append(key)  # tied weights have several keys
    told: dict[str, list[Any]] = {"missing_keys": [], "mismatched_keys": []}
    used = {one for key, _ in network.named_buffers() for one in _spellings(key, network)}
    for one, keys in tensors.values():
        spelled = [spelling for key in keys for spelling in _spellings(key, network)]
        source = next((spelling for spelling in spelled if spelling in saved), None)
        used |= {*spelled}
        if source is None:
            told["missing_keys"].append(keys[0])
        elif saved[source][1] != tuple(one.shape):
            told["mismatched_keys"].append((keys[0],))
        elif isinstance(one, nn.Parameter):
            defer(one, partial(_read, saved[source][0], source, one.shape, one.dtype))
        else:
            one.copy_(_read(saved[source][0], source, one.shape, one.dtype).read())
    return {**told, "unexpected_keys": [key for key in saved if key not in used]}


def _spellings(key: str, network: Any) -> tuple[str, ...]:
    prefix = f"{network.base_model_prefix}."
    return key, key.removeprefix(prefix), prefix + key


def _read(file: Path, key: str, shape: torch.Size, dtype: torch.dtype) -> SavedTensor:
    """Return a weight in a file; parts that are not used are never read."""
    from safetensors import safe_open

    content = safe_open(file, framework="pt").get_slice(key)
    return SavedTensor(torch.empty(shape, dtype=dtype, device="meta"), [Piece((0,) * len(shape), shape, content)])


def _saved_weights(name: str, revision: str | None) -> Iterator[tuple[str, tuple[Path, tuple[int, ...]]]]:
    """Yield the keys of a model's weights with the file that has each, and its shape there."""
    from safetensors import SafetensorError, safe_open

    for file in _files(name, revision):
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a dict
                    yield key, (file, tuple(opened.get_slice(key).get_shape()))
        except SafetensorError as error:
            raise wrong_argument("name", name, f"{file.name} is not a safetensors file ({error})") from None


def _files(name: str, revision: str | None) -> list[Path]:
    hub = import_hf("transformers.utils.hub")
    options = {"revision": revision}

    def find(file: str) -> str | None:
        missing = {"_raise_exceptions_for_missing_entries": False}
        with suppress(OSError):
            if found := hub.cached_file(name, file, **options, **missing, local_files_only=True):
                return found
        return None if Path(name).is_dir() else hub.cached_file(name, file, **options, **missing)

    if whole := find(WEIGHTS):
        return [Path(whole)]
    if index := find(INDEX):
        return [*map(Path, hub.get_checkpoint_shard_files(name, index, **options)[0])]
    raise wrong_argument(
        "name", name, f"has no {WEIGHTS}, which init_weights='by_name' reads; convert it, or set in_order"
    )
