"""Make, step and save optimizers without torch's wrappers for profilers, hooks and its compiler.

The wrappers for the compiler import `torch._dynamo`, which takes as long as torch itself, two thirds of a second. Torch
has no public way around them. The names used here are private: if another version of torch lacks one, its optimizers
are called in the ordinary way.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.optim import Optimizer

from runner.libraries.shortcuts import is_enabled

_WRAPPER: Any = None
_GRAD_MODE: Any = None
try:
    from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
    from torch.optim.optimizer import (
        _global_optimizer_post_hooks,
        _global_optimizer_pre_hooks,
        _use_grad_for_differentiable,
    )

    if is_enabled("optimizer"):
        _WRAPPER = Optimizer.profile_hook_step(print).__code__  # type: ignore[attr-defined]
    _GRAD_MODE = _use_grad_for_differentiable(print).__code__  # type: ignore[attr-defined]
except (ImportError, AttributeError):
    _WRAPPER = None  # so `step` reads none of the next three
    _global_optimizer_pre_hooks = _global_optimizer_post_hooks = OrderedDict()
    _profiler_enabled = bool
_NOT_COMPILED = ("add_param_group", "load_state_dict", "state_dict")


def step(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, without torch's wrappers if nothing needs them.

    Torch wraps the step of every optimizer class for profilers and hooks, which takes 15 us of host time per step even
    without any. A `step` set on the object itself, for example by torch's schedulers, is called unchanged.
    """
    class_step = type(optimizer).step
    if (
        _WRAPPER is None
        or getattr(class_step, "__code__", None) is not _WRAPPER
        or "step" in vars(optimizer)
        or getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or _profiler_enabled()
    ):
        optimizer.step()
        return
    inner = class_step.__wrapped__  # type: ignore[attr-defined]
    if getattr(inner, "__code__", None) is _GRAD_MODE:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            inner.__wrapped__(optimizer)
    else:
        inner(optimizer)


def spare_compiler() -> None:
    """Let optimizers be made, saved and loaded without `torch._dynamo`.

    Torch excludes these methods from compilation, and imports its compiler to do so at their first call. It marks
    excluded functions with an attribute, which is set here for the whole process: a compiled function that calls one of
    these methods then compiles it too. If another version uses another mark, it imports the compiler as usual.
    """
    if not is_enabled("compiler"):
        return
    for name in _NOT_COMPILED:
        function = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if function is not None:
            vars(function).setdefault("__dynamo_disable", function)
