"""Load weights into a model by name, and report those that do not fit."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runner.checkpoints.base import forget_base, names_in_base
from runner.checkpoints.files import read_file, read_tensors
from runner.checkpoints.shards import SUFFIX
from runner.distributed.ranks import get_global_rank
from runner.distributed.sharding import like
from runner.failures.errors import UnreadableCheckpoint

log = logging.getLogger("runner")

OTHER_SHAPE = "of another shape"
WRAPPER_PREFIX = "module."
"""Prefix of the names of a plain network's weights in a model that holds it, such as `ClassificationModel`."""

OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of a file written by torch before 1.6: a pickled number."""


def differences(weights: Mapping[str, Any], model: nn.Module, ignored: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the names of weights that do not fit a model, by kind of difference, except the `ignored` ones.

    Shapes of extra state (`get_extra_state`) and of quantization observers may change, so they are not compared.
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


def read_weights(path: str | Path, model: nn.Module) -> dict[str, Any]:
    """Read weights, and return them by their names in a model.

    Args:
        path: the folder of a checkpoint that `find_checkpoint` returned, or a file of weights: `.pt`, `.pth` or
            `.safetensors`.
        model: the model. If it wraps a plain network, as `ClassificationModel` does, a file may use the network's
            own names.

    Raises:
        ValueError: the weights cannot be read.
    """
    path = Path(path)
    if not is_weights_file(path):
        return read_file(path, "model.pt")
    _refuse_old_format(path)
    weights = _read_safetensors(path) if path.suffix == SUFFIX else read_tensors(path)
    own = model.state_dict().keys()
    has_plain_names = not own & weights.keys() and any(f"{WRAPPER_PREFIX}{name}" in own for name in weights)
    return {f"{WRAPPER_PREFIX}{name}": value for name, value in weights.items()} if has_plain_names else weights


def is_weights_file(path: Path) -> bool:
    """Return whether a path is a file of weights, judging by its suffix."""
    return path.suffix in (".pt", ".pth", SUFFIX) and path.is_file()


def _refuse_old_format(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(OLD_FORMAT)) != OLD_FORMAT:
            return
    program = "import sys, torch; torch.save(torch.load(sys.argv[1], weights_only=True), sys.argv[2])"
    command = f"python -c '{program}' {shlex.quote(str(path))} new.pth"
    raise UnreadableCheckpoint(f"{path} has the format of torch before 1.6; convert it: {command}")


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UnreadableCheckpoint(f"{path} is not a safetensors file ({error})") from None


def describe_differences(wrong: Mapping[str, Sequence[str]]) -> str:
    """Return the result of `differences` as text, with the first three names of each kind."""
    return "; ".join(
        f"{kind} {', '.join(keys[:3])}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        for kind, keys in wrong.items()
    )


def load_all_into(model: nn.Module, weights: Mapping[str, Any], path: str | Path, strict: bool) -> None:
    """Load the weights of a checkpoint into a model; without `strict`, a warning lists names that differ."""
    wrong = differences(weights, model, names_in_base(model, weights, Path(path)))
    if OTHER_SHAPE in wrong or (strict and wrong):
        raise ValueError(f"weights of {str(path)!r} do not fit the model: {describe_differences(wrong)}")
    if wrong and get_global_rank() == 0:
        log.warning("weights of %s loaded in part: %s", path, describe_differences(wrong))
    load_into(model, weights)


def load_into(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights by name into a model; each rank has them whole, shards take their part, and other weights stay."""
    own = model.state_dict()
    forget_base(model, weights)
    fitting = {
        name: like(value, own[name]) if isinstance(value, Tensor) and isinstance(own[name], Tensor) else value
        for name, value in weights.items()
        if name in own
    }
    try:
        model.load_state_dict(fitting, strict=False)
    except RuntimeError as error:  # torch's own error, for shapes that were not compared
        raise ValueError(f"these weights do not fit the model: {error}") from error


def _with_fixed_shapes(model: nn.Module, own: Mapping[str, Any]) -> list[str]:
    """Return the names in a model's state that cannot be loaded with another shape."""
    observers = names_of_observers(model)
    return [
        key
        for key, value in own.items()
        if isinstance(value, Tensor) and not key.endswith("_extra_state") and key.rpartition(".")[0] not in observers
    ]


def names_of_observers(model: nn.Module) -> set[str]:
    """Return the names of a model's quantization observers, whose buffers get their shapes from the first batch."""
    packages = ("torch.ao.quantization", "torchao.quantization")
    return {
        name
        for name, module in model.named_modules()
        if any(kind.__module__.startswith(packages) for kind in type(module).__mro__)
    }


def _shape_of(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
