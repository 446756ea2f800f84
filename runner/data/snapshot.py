"""Notice that a data set has changed since its workers got a copy of it."""

from __future__ import annotations

from functools import partial
from types import MethodType, ModuleType
from typing import Any

import numpy
from torch import Tensor

MOST_PARTS = 1000
"""Number of parts of a data set, from the outside in, after which no more are added."""
SMALL = 4096
"""Maximum bytes of an array, and elements of a container, whose content is compared."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Snapshot:
    """A cheap summary of an object, to compare with a later one.

    It covers the object's attributes, their attributes, and so on: numbers and text by value, other objects by
    identity, containers by length, tensors by torch's version counter. Small arrays and containers are also compared
    by content. A write into a large array or list is not noticed.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self._values: list[Any] = []
        self._objects: list[Any] = []  # kept alive, so that no other object can get the same id
        waiting = [value]
        seen: set[int] = set()
        for part in waiting:  # the loop appends to it
            if isinstance(part, _PLAIN):
                self._values.append((type(part), part))
            elif id(part) not in seen:
                seen.add(id(part))
                self._objects.append(part)
                self._values.append(_outline(part))
                if len(waiting) < MOST_PARTS:
                    waiting += _parts(part)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot) or len(self._objects) != len(other._objects):
            return False
        same = all(left is right for left, right in zip(self._objects, other._objects, strict=True))
        return same and repr(self._values) == repr(other._values)  # repr, because NaN does not equal NaN

    __hash__ = None  # type: ignore[assignment]


def _outline(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part._version, tuple(part.shape)
    if isinstance(part, numpy.ndarray):
        return (part.shape, part.tobytes()) if part.nbytes <= SMALL and part.dtype != object else part.shape
    if isinstance(part, list | tuple | dict | set | frozenset | bytearray):
        return len(part)
    return None


def _parts(part: Any) -> list[Any]:
    if isinstance(part, Tensor | numpy.ndarray | type | ModuleType):
        return []
    if isinstance(part, dict):
        return [*part.keys(), *part.values()] if len(part) <= SMALL else []
    if isinstance(part, list | tuple | set | frozenset):
        return [*part] if len(part) <= SMALL else []
    if isinstance(part, partial):
        return [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, MethodType):
        return [part.__self__]
    return [*getattr(part, "__dict__", {}).values()]
