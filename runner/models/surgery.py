"""Model surgery: replacing modules anywhere in a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

Selector = type[nn.Module] | Callable[[nn.Module], bool]
"""A type selects modules of exactly that type, because a subclass may compute something else. A function selects the
modules for which it returns True."""

Policy = Callable[[nn.Module, int], nn.Module | None]
"""Returns a module's replacement, or None to keep the module; the int is the number of earlier calls of the policy."""

_Pairs = dict[str, tuple[nn.Module, nn.Module]]


def replace_modules(
    model: nn.Module,
    policies: Mapping[Selector, Policy],
    optimizers: Sequence[Optimizer] = (),
    recurse_on_replaced: bool = False,
) -> dict[str, nn.Module]:
    """Replace modules of a model in place, and return the replacements by the first name of the replaced module.

    Parents are visited before their children, and the first matching selector decides. A module that occurs several
    times is replaced everywhere by one replacement, which may contain it. If a replacement reuses the parameters
    themselves rather than copies, their optimizer state, their `requires_grad` and any sharing with other modules are
    kept. New modules and tensors in a replacement get the dtype, device and mode of the replaced module or, if that has
    no weights, the dtype and device of the model.

    Args:
        model: the model to change. If the model itself is selected, its replacement is in the result under the name '',
            and the caller must use it instead of the model.
        policies: a policy for each selector.
        optimizers: existing optimizers. New parameters join the parameter group of the replaced module, and parameters
            that have left the model are dropped together with their state.
        recurse_on_replaced: whether to continue inside replacements.

    Raises:
        ValueError: a module that would be lost has hooks or parametrizations, or the parameters of a replaced module
            are in no parameter group or in several, so that new ones cannot join theirs.
    """
    known = set(model.parameters())
    calls = dict.fromkeys(policies, 0)
    results: dict[nn.Module, nn.Module] = {}  # maps each visited module to its replacement, or to itself
    replaced: _Pairs = {}

    def visit(module: nn.Module, name: str) -> nn.Module:
        if module in results:
            return results[module]
        new = results[module] = module  # a module stays inside its own replacement
        selector = next((selector for selector in policies if _selects(selector, module)), None)
        if selector is not None:
            replacement = policies[selector](module, calls[selector])
            calls[selector] += 1
            if replacement is not None:
                new = replacement
                _refuse_if_hooks_lost(module, new, name)
                _adapt(new, module, model)
                replaced[name] = module, new
        if new is module or recurse_on_replaced:
            for key, child in [*new._modules.items()]:  # named_children() skips repeated modules
                if child is not None:
                    new.register_module(key, visit(child, f"{name}.{key}" if name else key))
        results[module] = new
        return new

    root = visit(model, "")
    _regroup(optimizers, replaced, known, root)
    return {name: new for name, (_, new) in replaced.items()}


def _selects(selector: Selector, module: nn.Module) -> bool:
    kind = parametrize.type_before_parametrizations(module)
    return kind is selector if isinstance(selector, type) else selector(module)


def _refuse_if_hooks_lost(old: nn.Module, new: nn.Module, name: str) -> None:
    """Check that no module dropped by a replacement has hooks or parametrizations."""
    for lost in {*old.modules()} - {*new.modules()}:
        hooks = (lost._forward_hooks, lost._forward_pre_hooks, lost._backward_hooks, lost._backward_pre_hooks)
        if parametrize.is_parametrized(lost) or any(hooks):
            kind = type(lost).__name__
            raise ValueError(
                f"module {name!r}: hooks or parametrizations of its {kind} would be lost; add them after the surgery"
            )


def _adapt(new: nn.Module, old: nn.Module, model: nn.Module) -> None:
    """Give new modules and tensors the device, dtype and mode of the replaced module."""
    old_tensors = [*old.parameters(), *old.buffers()]
    tensors = chain(old_tensors, model.parameters(), model.buffers())
    example = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
    new.to(example.device)
    for module in {*new.modules()} - {*old.modules()}:
        module.training = old.training
    for tensor in {*new.parameters(), *new.buffers()} - {*old_tensors}:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(example.dtype)


def _regroup(optimizers: Sequence[Optimizer], replaced: _Pairs, known: set[nn.Parameter], root: nn.Module) -> None:
    """Add new parameters to the parameter groups of the replaced modules, and drop those that left the model."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for name, (old, new) in replaced.items():
        added = [parameter for parameter in new.parameters() if parameter.requires_grad and parameter not in known]
        old_parameters = {*old.parameters()}
        targets = groups if len(groups) == 1 else [group for group in groups if old_parameters & {*group["params"]}]
        if added and groups and len(targets) != 1:
            raise ValueError(
                f"module {name!r}: its new parameters belong to none or to several of the {len(groups)} groups of the "
                "optimizers; give optimizers as factories, which are called after the surgery"
            )
        for group in targets:
            group["params"] = [*group["params"], *added]
        known = known | {*added}
    gone = known - {*root.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in gone]
        for parameter in gone & optimizer.state.keys():
            del optimizer.state[parameter]
