"""Frozen weights that checkpoints leave out, because they come from a named model, the base."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.checkpoints.hashing import digest
from runner.distributed.deferred import value_of
from runner.distributed.ranks import get_global_rank
from runner.distributed.sharding import whole
from runner.failures.errors import wrong_argument
from runner.files.whole import read_object

BASE = "base.json"
"""File in a checkpoint that names the bases of its model, by module path."""

log = logging.getLogger("runner")


@dataclass
class Base:
    """Where the frozen weights of a module come from.

    Attributes:
        name: a folder, or a model on the Hub. It is only shown: loading a checkpoint never reads from there.
        revision: revision of the model on the Hub; None is its main branch.
        digest: hash of all the base's weights, by their names there; empty on ranks that do not compute it.
        weights: the module's names of the weights that checkpoints leave out while they are frozen.
        sums: checksums of these weights, which reveal changes.
    """

    name: str
    revision: str | None
    digest: str
    weights: set[str]
    sums: dict[str, int] = field(default_factory=dict)


def digest_of(weights: Mapping[str, nn.Parameter]) -> str:
    """Return a hash of weights by name, which is the same before and after deferred weights have been read."""
    with ThreadPoolExecutor() as threads:  # hashlib releases the GIL
        digests = threads.map(lambda weight: digest(value_of(weight)), weights.values())
        return digest(dict(zip(weights, digests, strict=True)))


def bases_of(model: nn.Module) -> dict[str, Base]:
    """Return a model's bases by module path: the attributes `checkpoint_base` of its modules."""
    bases = {name: getattr(module, "checkpoint_base", None) for name, module in model.named_modules()}
    return {name: base for name, base in bases.items() if isinstance(base, Base)}


def parameter_of(name: str) -> str:
    """Return the name of the parameter to which an entry of a `state_dict` belongs, such as its quantization scales."""
    head, _, part = name.partition(".weight.")
    return f"{head}.weight" if part else name


def state_to_save(model: nn.Module) -> dict[str, Any]:
    """Return the entries of a model's `state_dict` that a checkpoint holds. Call it on all ranks that save a part."""
    skipped = left_out(model)
    state = model.state_dict(keep_vars=True)  # the parameters themselves, because detaching DTensors is slow
    return {name: value for name, value in state.items() if id(state.get(parameter_of(name), value)) not in skipped}


def left_out(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that a checkpoint leaves out now. Call it on all ranks that save a part."""
    forget_changed(model)
    return _ids(model)


def describe_bases(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return a dict from the file name `base.json` to its content; empty if checkpoints leave nothing out."""
    facts = {
        path: {"name": base.name, "revision": base.revision, "digest": base.digest}
        for path, base in bases_of(model).items()
        if base.weights
    }
    return {BASE: facts} if facts else {}


def digests_of(model: nn.Module) -> tuple[str, str]:
    """Return the digests of a model's bases, separated by commas, and the digest of what a checkpoint would hold now.

    Both are empty without a base. Call it on all ranks.
    """
    known = [base.digest for base in bases_of(model).values() if base.weights]
    if not known:
        return "", ""
    return ", ".join(known), digest(state_to_save(model))


def names_in_base(model: nn.Module, weights: Mapping[str, Any], checkpoint: Path) -> set[str]:
    """Return the names of a model's weights that a checkpoint left out, after checking that the model has its base.

    Raises:
        ValueError: the model has no base, or another one.
    """
    recorded = read_object(checkpoint / BASE) if checkpoint.is_dir() else {}
    if not recorded:
        return set()
    own = bases_of(model)
    for path, facts in recorded.items():
        facts = facts if isinstance(facts, dict) else {}
        key = f"model.{path}.name" if path else "name"
        needed = f"checkpoint {str(checkpoint)!r} holds only what was trained on the base {facts.get('name')!r}"
        if path not in own:
            reason = "the model has none: give model.module.pretrained=true and the same lora"
            raise ValueError(f"{needed}, with the digest {facts.get('digest')}; {reason}")
        if own[path].digest and own[path].digest != facts.get("digest"):
            reason = f"{needed}, whose digest is {facts.get('digest')}; these weights have {own[path].digest}. Give"
            raise wrong_argument(key, own[path].name, f"{reason} {key}=<a folder or a model with those weights>")
    shared = _ids(model)
    tied = {name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in shared}
    return {name for name in model.state_dict() if parameter_of(name) in tied} - weights.keys()


def forget_base(model: nn.Module, loaded: Iterable[str]) -> None:
    """Include weights in later checkpoints if they were loaded from elsewhere than the base."""
    for path, base in bases_of(model).items():
        prefix = f"{path}." if path else ""
        base.weights -= {name.removeprefix(prefix) for name in loaded if name.startswith(prefix)}


def forget_changed(model: nn.Module) -> None:
    """Include weights in later checkpoints if they are trained now, or were changed in place since the first call.

    Computes checksums of frozen weights, which takes 0.2 s per billion bytes on a CPU. If the model is sharded, call it
    on all ranks.
    """
    for path, base in bases_of(model).items():
        weights = dict(model.get_submodule(path).named_parameters())
        base.weights -= {name for name in base.weights if name in weights and weights[name].requires_grad}
        kept = [name for name in sorted(base.weights) if name in weights and not weights[name].is_meta]
        sums = dict(zip(kept, _sums([weights[name] for name in kept]), strict=True))
        changed = [name for name in kept if base.sums.setdefault(name, sums[name]) != sums[name]]
        base.weights -= {*changed}
        if changed and get_global_rank() == 0:
            reason = "something changed them in place, such as an algorithm; checkpoints hold them from now on"
            log.warning(
                "%d frozen weights are no longer those of %r: %s (%s)", len(changed), base.name, changed[0], reason
            )


@torch.no_grad()
def _sums(weights: Sequence[nn.Parameter]) -> list[int]:
    """Return a checksum of each weight, regardless of its device and layout."""
    sums = []
    for weight in weights:
        flat = whole(weight).reshape(-1)
        rest = -len(flat) % max(1, 8 // flat.element_size())
        if rest or flat.storage_offset():
            flat = torch.cat([flat, flat.new_zeros(rest)])
        sums.append(flat.view(torch.int64).sum())
    return torch.stack(sums).tolist() if sums else []  # the intended sync


def _ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are in a base."""
    bases = [(model.get_submodule(path), base) for path, base in bases_of(model).items()]
    return {id(weight) for part, base in bases for name, weight in part.named_parameters() if name in base.weights}
