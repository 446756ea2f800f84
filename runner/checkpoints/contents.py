"""What a checkpoint can hold: tensors, numbers, strings, lists and dicts, which load without unpickling."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy
import torch
from torch import Tensor

from runner.failures.facts import UnsupportedType

_VALUES = (NoneType, bool, int, float, complex, str, bytes)
_DICTS = (dict, OrderedDict, Counter)  # a Counter is in the state of torch's MultiStepLR
_LISTS = (list, tuple, torch.Size)


def map_saved(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested containers with `function` applied to their tensors, ready for `torch.save`.

    Subclasses are refused too, such as an `IntEnum`, a named tuple or a `defaultdict`: torch would write the name of
    their class, and refuse to load it. Numbers of numpy become Python's.

    Raises:
        UnsupportedType: something in it cannot be loaded from a checkpoint.
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
