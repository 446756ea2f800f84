"""The content of a checkpoint: tensors, numbers, strings, lists and dicts, which load without unpickling."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy
import torch
from torch import Tensor

from runner.checkpoints.manifest import read_time
from runner.failures.errors import UnsupportedType

_VALUES = (NoneType, bool, int, float, complex, str, bytes)
_DICTS = (dict, OrderedDict, Counter)  # a Counter is in the state of torch's MultiStepLR
_LISTS = (list, tuple, torch.Size)
_STATE = {
    "timestamp": dict,
    "model": (dict, NoneType),
    "optimizers": list,
    "schedulers": list,
    "scaler": (dict, NoneType),
    "algorithms": dict,
    "callbacks": dict,
    "train_metrics": dict,
    "train_metric_values": dict,
    "eval_metric_values": dict,
    "evaluated_at": dict,
    "order": dict,
}
"""The entries that `state.pt` must have, and their types."""


def map_saved(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested containers with `function` applied to their tensors, ready for `torch.save`.

    Subclasses such as an `IntEnum`, a named tuple or a `defaultdict` are refused: torch would write the name of their
    class, and then refuse to load it. NumPy's numbers become Python's.

    Raises:
        UnsupportedType: the value contains something that cannot be loaded from a checkpoint.
    """
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind in _VALUES:
        return value
    if kind in _DICTS:
        return kind({map_saved(key, function): map_saved(item, function) for key, item in value.items()})
    if kind in _LISTS:
        return kind([map_saved(item, function) for item in value])
    if isinstance(value, numpy.generic):
        return map_saved(value.item(), function)
    raise UnsupportedType(f"a checkpoint cannot hold a {kind.__name__}", kind.__name__)


def check_content(name: str, content: Any) -> None:
    """Check that the content of `model.pt` or `state.pt` has the required entries; raise ValueError if not."""
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError("its content is not a dict with names as keys")
    if name == "state.pt":
        for key, kinds in _STATE.items():
            if not isinstance(content.get(key), kinds):
                raise ValueError(f"its {key!r} is missing or of another type")
        read_time(content["timestamp"])
