"""Draw initial weights one by one, each from the seed and its own name, after the model has been built.

Each rank of a sharded model draws a weight, keeps its part, and moves on to the next: no rank ever holds the whole
model, and the weights are the same on any number of ranks. They differ from the default initial weights of the same
seed, which one generator draws in order.
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
"""Operations that allocate a tensor without values."""
SETTING = ("normal_", "uniform_", "zero_", "fill_")
"""Operations that overwrite a tensor without reading its values."""

_is_active = ContextVar("_is_active", default=False)


def is_making_by_name() -> bool:
    """Return whether `make_by_name` is making a module, whose weights get their values later."""
    return _is_active.get()


def make_by_name(make: Callable[[], T], seed: int) -> T:
    """Return the module that `make` makes; its weights are drawn later, from the seed and their names.

    This applies to weights that are allocated without values, as in torch's own layers, and then initialized in whole
    or in part: drawn, filled, scaled. Weights made from values, such as `torch.ones(3)`, keep these values. Weights
    that are already deferred, because a file has them, are read from that file.

    Raises:
        ValueError: a weight's initial value is computed from other tensors, as in orthogonal initialization.
    """
    recorder = _Recorder()
    handle = register_module_parameter_registration_hook(recorder.register)
    active = _is_active.set(True)
    try:
        with recorder:
            module = make()
    finally:
        _is_active.reset(active)
        handle.remove()
    parameters: Any = module.named_parameters() if isinstance(module, nn.Module) else ()
    for name, weight in parameters:
        if (steps := recorder.steps.get(_storage_id(weight))) is not None and not is_deferred(weight):
            weight_seed = stream_seed(seed, f"weights.{name}")
            defer(weight, partial(_draw, weight_seed, weight.shape, weight.dtype, tuple(steps)))
    return module


def _draw(seed: int, shape: torch.Size, dtype: torch.dtype, steps: tuple[Any, ...]) -> Tensor:
    """Return the whole value of a weight, on the CPU; it is the same on each rank."""
    value = torch.empty(shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for function, (size, stride, offset), arguments, options in steps:
        if any(argument.name == "generator" for argument in function._schema.arguments):
            options = {**options, "generator": generator}
        function(value.as_strided(size, stride, offset), *arguments, **options)
    return value


class _Recorder(TorchDispatchMode):
    """Records operations on weights without values instead of running them: the weights' memory is never touched.

    Attributes:
        steps: the recorded operations on each weight without values, by storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, list[Any]] = {}
        self._blank: dict[int, Any] = {}  # storages that nothing has been written to

    def register(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Start to record operations on a parameter that a module registers, if it has no value."""
        if parameter is not None and self._blank.pop(_storage_id(parameter), None) is not None:
            self.steps[_storage_id(parameter)] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_weight = any(_storage_id(tensor) in self.steps for tensor in tensors)
        if has_weight and not func.is_view and not name.endswith("_like") and not name.startswith("new_"):
            return self._record(func, name, args, kwargs, tensors)
        if func._schema.is_mutable:
            for tensor in tensors:
                self._blank.pop(_storage_id(tensor), None)
        result = func(*args, **kwargs)
        if name in BLANK:
            self._blank[_storage_id(result)] = result.untyped_storage()
        return result

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Tensor:
        if not name.endswith("_") or len(tensors) > 1:
            reason = f"the initial value of a weight is computed from other tensors ({name}), not drawn independently"
            raise ValueError(f"init_weights='by_name': {reason}; set in_order")
        (weight,) = tensors
        steps = self.steps[_storage_id(weight)]
        if name in SETTING and weight.nbytes == weight.untyped_storage().nbytes():
            steps.clear()
        steps.append((func, (weight.shape, weight.stride(), weight.storage_offset()), args[1:], kwargs))
        return weight


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
