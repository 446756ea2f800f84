"""Frozen weights that checkpoints leave out, because a named model, the base, has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from runner.checkpoints.hashing import digest
from runner.distributed.deferred import value_of
from runner.failures.errors import wrong_argument
from runner.files.whole import read_object

BASE = "base.json"
"""File of a checkpoint that names the bases of its model, by the path of the module."""
_ATTRIBUTE = "checkpoint_base"


@dataclass
class Base:
    """Where the frozen weights of a module come from.

    Attributes:
        name: a folder, or a model on the Hub. It is only shown: a checkpoint is never a reason to read from there.
        revision: revision of the model on the Hub; None is its main branch.
        digest: hash of all weights that the base has, by their names there.
        weights: names in the module of the weights that checkpoints leave out while they are frozen.
    """

    name: str
    revision: str | None
    digest: str
    weights: set[str]


def digest_of(weights: Mapping[str, nn.Parameter]) -> str:
    """Return a hash of weights by name, which is the same before and after deferred weights have been read."""
    return digest({name: digest(value_of(weight)) for name, weight in weights.items()})


def set_base(module: nn.Module, base: Base) -> None:
    """Let checkpoints leave out the weights of a base, as long as they stay frozen."""
    setattr(module, _ATTRIBUTE, base)


def bases_of(model: nn.Module) -> dict[str, Base]:
    """Return the bases of a model by the path of the module that has one."""
    bases = {name: getattr(module, _ATTRIBUTE, None) for name, module in model.named_modules()}
    return {name: base for name, base in bases.items() if isinstance(base, Base)}


def left_out(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that a checkpoint leaves out now."""
    forget_trained(model)
    names = {*_names(bases_of(model))}
    return {id(weight) for name, weight in model.named_parameters() if name in names}


def describe_bases(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the content of `base.json` by the name of that file; empty if checkpoints leave nothing out."""
    facts = {
        path: {"name": base.name, "revision": base.revision, "digest": base.digest}
        for path, base in bases_of(model).items()
        if base.weights
    }
    return {BASE: facts} if facts else {}


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
        if own[path].digest != facts.get("digest"):
            reason = f"{needed}, whose digest is {facts.get('digest')}; these weights have {own[path].digest}. Give"
            raise wrong_argument(key, own[path].name, f"{reason} {key}=<a folder or a model with those weights>")
    shared = {id(weight) for name, weight in model.named_parameters() if name in {*_names(own)}}
    tied = {name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in shared}
    return tied - weights.keys()


def forget_base(model: nn.Module, loaded: Iterable[str]) -> None:
    """Save weights in later checkpoints that were loaded from elsewhere than the base."""
    names = {*loaded}
    for path, base in bases_of(model).items():
        base.weights -= {name for name in base.weights if _join(path, name) in names}


def forget_trained(model: nn.Module) -> None:
    """Save weights in later checkpoints, frozen again or not, that are trained now."""
    if bases_of(model):
        forget_base(model, [name for name, weight in model.named_parameters() if weight.requires_grad])


def _names(bases: Mapping[str, Base]) -> Iterator[str]:
    return (_join(path, name) for path, base in bases.items() for name in base.weights)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
