"""First weights that are drawn one by one, each from the seed and its name, after the model has been built.

Each rank of a sharded model draws a weight, keeps its part, and moves on to the next: no rank ever holds the whole
model, and the weights are the same on any number of ranks. They are not those of the same seed without this, for
which weights are drawn one after another from one generator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.core.randomness import stream_seed
from runner.distributed.deferred import defer, is_deferred

T = TypeVar("T")
BLANK = ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like")
SETTING = ("normal_", "uniform_", "zero_", "fill_")
"""Operations that leave nothing of what a tensor held."""

_is_active = ContextVar("_is_active", default=False)


def is_making_by_name() -> bool:
    """Return whether a module is being made whose weights get their values later."""
    return _is_active.get()


def make_by_name(make: Callable[[], T], seed: int) -> T:
    """Return the module that a function makes, whose weights are drawn later, from the seed and their names.

    These are the weights that are made without values, as those of torch's own layers, and what initializes them:
    drawing, filling, scaling, also of a part of them. Weights made of values, such as `torch.ones(3)`, keep these, and
    those that are deferred already, because a file has them, are read from there.

    Raises:
        ValueError: a weight's first value is computed from others, as in orthogonal initialization.
    """
    notes = _Notes()
    handle = register_module_parameter_registration_hook(notes.register)
    active = _is_active.set(True)
    try:
        with notes:
            made = make()
    finally:
        _is_active.reset(active)
        handle.remove()
    named: Any = made.named_parameters() if isinstance(made, nn.Module) else ()
    for name, one in named:
        if (steps := notes.steps.get(_storage(one))) is not None and not is_deferred(one):
            defer(one, partial(_draw, stream_seed(seed, f"weights.{name}"), one.shape, one.dtype, tuple(steps)))
    return made


def _draw(seed: int, shape: torch.Size, dtype: torch.dtype, steps: tuple[Any, ...]) -> Tensor:
    """Return the whole value of a weight, on the CPU, the same on each rank."""
    value = torch.empty(shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for function, (size, stride, offset), arguments, options in steps:
        if any(one.name == "generator" for one in function._schema.arguments):
            options = {**options, "generator": generator}
        function(value.as_strided(size, stride, offset), *arguments, **options)
    return value


class _Notes(TorchDispatchMode):
    """Records operations on weights without values instead of running them: their memory is never touched.

    Attributes:
        steps: recorded operations on each weight without values, by storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, list[Any]] = {}
        self._blank: dict[int, Any] = {}  # storages that nothing was written to

    def register(self, module: nn.Module, name: str, one: Any) -> None:
        """Note a parameter that a module registers, if it has no value."""
        if one is not None and self._blank.pop(_storage(one), None) is not None:
            self.steps[_storage(one)] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        ours = [one for one in given if _storage(one) in self.steps]
        if ours and not func.is_view and not name.endswith("_like") and not name.startswith("new_"):
            return self._note(func, name, args, kwargs, given)
        if func._schema.is_mutable:
            for one in given:
                self._blank.pop(_storage(one), None)
        result = func(*args, **kwargs)
        if name in BLANK:
            self._blank[_storage(result)] = result.untyped_storage()
        return result

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Tensor:
        if not name.endswith("_") or len(given) > 1:
            reason = f"the first value of a weight is computed from others ({name}), not drawn independently"
            raise ValueError(f"init_weights='by_name': {reason}; set in_order")
        (one,) = given
        steps = self.steps[_storage(one)]
        if name in SETTING and one.nbytes == one.untyped_storage().nbytes():
            steps.clear()
        steps.append((func, (one.shape, one.stride(), one.storage_offset()), args[1:], kwargs))
        return one


def _storage(one: Tensor) -> int:
    return one.untyped_storage()._cdata
