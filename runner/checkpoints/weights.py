"""Weights that are loaded by name into a model, and what does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runner.checkpoints.files import find_checkpoint, read_file, read_tensors
from runner.checkpoints.shards import SUFFIX
from runner.distributed.ranks import get_global_rank
from runner.distributed.sharding import like
from runner.failures.errors import UnreadableCheckpoint

log = logging.getLogger("runner")

OTHER_SHAPE = "of another shape"
WRAPPED = "module."
"""What the names of a plain network's weights begin with in a model that holds it, such as `ClassificationModel`."""


def differences(weights: Mapping[str, Any], model: nn.Module, ignored: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the names of weights that do not fit a model's own, by kind of difference, without `ignored` ones.

    Shapes are compared only where they are fixed: not in what `get_extra_state` returned, nor in observers.
    """
    own = {key: value for key, value in model.state_dict().items() if key not in ignored}
    fixed = _with_fixed_shapes(model, own)
    kinds = {
        "missing": [key for key in own if key not in weights],
        "unexpected": [key for key in weights if key not in own],
        OTHER_SHAPE: [
            f"{key} {_shape_of(weights[key])} into {_shape_of(own[key])}"
            for key in fixed
            if key in weights and _shape_of(weights[key]) != _shape_of(own[key])
        ],
    }
    return {kind: keys for kind, keys in kinds.items() if keys}


def read_weights(
    path: str | Path, model: nn.Module, check: Callable[[Path], str | None] | None = None
) -> dict[str, Any]:
    """Return weights by the names that they have in a model.

    Args:
        path: the folder of a run or of a checkpoint; or a file as `runner export` writes it, `.pt` or `.safetensors`.
        model: a `ClassificationModel` or another one that holds the plain network, whose weights may be in a file.
        check: see `find_checkpoint`.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: the weights cannot be read.
    """
    path = Path(path)
    if not is_weights_file(path):
        return read_file(find_checkpoint(path, check), "model.pt")
    weights = _read_safetensors(path) if path.suffix == SUFFIX else read_tensors(path)
    own = model.state_dict().keys()
    is_of_network = not own & weights.keys() and any(f"{WRAPPED}{name}" in own for name in weights)
    return {f"{WRAPPED}{name}": value for name, value in weights.items()} if is_of_network else weights


def is_weights_file(path: Path) -> bool:
    """Return whether a path is that of a file of weights, by its suffix."""
    return path.suffix in (".pt", SUFFIX) and path.is_file()


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UnreadableCheckpoint(f"{path} is not a safetensors file ({error})") from None


def describe_differences(wrong: Mapping[str, Sequence[str]]) -> str:
    """Return what `differences` found as text, with the first three names of each kind."""
    return "; ".join(
        f"{kind} {', '.join(keys[:3])}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        for kind, keys in wrong.items()
    )


def load_all_into(model: nn.Module, weights: Mapping[str, Any], path: str | Path, strict: bool) -> None:
    """Load the weights of a checkpoint into a model; a warning names those that do not fit, if that is allowed."""
    wrong = differences(weights, model)
    if OTHER_SHAPE in wrong or (strict and wrong):
        raise ValueError(f"weights of {str(path)!r} do not fit the model: {describe_differences(wrong)}")
    if wrong and get_global_rank() == 0:
        log.warning("weights of %s loaded in part: %s", path, describe_differences(wrong))
    load_into(model, weights)


def load_into(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights by name, whole on each rank, into a model; other weights stay, and shards take their part."""
    own = model.state_dict()
    placed = {
        name: like(value, own[name]) if isinstance(value, Tensor) and isinstance(own[name], Tensor) else value
        for name, value in weights.items()
        if name in own
    }
    try:
        model.load_state_dict(placed, strict=False)
    except RuntimeError as error:  # of torch, where no shape was compared
        raise ValueError(f"these weights do not fit the model: {error}") from error


def _with_fixed_shapes(model: nn.Module, own: Mapping[str, Any]) -> list[str]:
    """Return the names in a model's own state whose values cannot be loaded with another shape."""
    observers = names_of_observers(model)
    return [
        key
        for key, value in own.items()
        if isinstance(value, Tensor) and not key.endswith("_extra_state") and key.rpartition(".")[0] not in observers
    ]


def names_of_observers(model: nn.Module) -> set[str]:
    """Return the names of a model's observers of quantization, whose buffers get their shapes from the first batch."""
    packages = ("torch.ao.quantization", "torchao.quantization")
    return {
        name
        for name, module in model.named_modules()
        if any(kind.__module__.startswith(packages) for kind in type(module).__mro__)
    }


def _shape_of(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
