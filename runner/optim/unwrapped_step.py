"""Step an optimizer without torch's wrappers for profilers and hooks, while there are none."""

from __future__ import annotations

from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_WRAPPER = Optimizer.profile_hook_step(print).__code__  # type: ignore[attr-defined]


def step(optimizer: Optimizer) -> None:
    """Do what `optimizer.step()` does.

    Torch wraps the step of every optimizer class for profilers and hooks. This takes 15 us of host time per step, even
    without a profiler or hooks. A `step` set on the object itself, for example by torch's schedulers, is called
    unchanged.
    """
    of_class = type(optimizer).step
    if (
        getattr(of_class, "__code__", None) is not _WRAPPER
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or _profiler_enabled()
    ):
        optimizer.step()
    else:
        of_class.__wrapped__(optimizer)  # type: ignore[attr-defined]
