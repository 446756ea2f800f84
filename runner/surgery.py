"""Model surgery: replaces modules anywhere in a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

Selector = type[nn.Module] | Callable[[nn.Module], bool]
"""Selects the modules of exactly this type (a subclass may compute something else), or those for which it is true."""

Policy = Callable[[nn.Module, int], nn.Module | None]
"""Returns the replacement of a module, or None to keep it; the number counts the modules it was asked about before."""

_Pairs = dict[str, tuple[nn.Module, nn.Module]]


def replace_modules(
    model: nn.Module,
    policies: Mapping[Selector, Policy],
    optimizers: Sequence[Optimizer] = (),
    recurse_on_replaced: bool = False,
) -> dict[str, nn.Module]:
    """Replace modules of a model in place, and return the replacements by the name of their first place in it.

    Parents are visited before their children, and the first selector that matches decides. A module that stands in
    several places is replaced once, for all of them. A replacement may contain the module that it replaces. If it takes
    over parameters themselves, not copies of them, then their state in optimizers, their `requires_grad` and any
    sharing with other modules are kept. Whatever is new in a replacement gets the dtype, device and mode of the
    replaced module; if that has no weights, the dtype and device of the model.

    Args:
        model: model to change. If it is to be replaced itself, the caller must do that: the replacement is in the
            result under the name ''.
        policies: what to replace modules with, for each kind of module to select.
        optimizers: optimizers that exist already. New parameters join the groups of the replaced module's parameters,
            and parameters that have left the model are dropped, with their state.
        recurse_on_replaced: whether to continue inside replacements.

    Raises:
        ValueError: a module that would be lost has hooks or parametrizations, or it is unclear which parameter group
            new parameters belong to.
    """
    known = set(model.parameters())
    asked = dict.fromkeys(policies, 0)
    standing: dict[nn.Module, nn.Module] = {}  # each visited module's replacement, or the module itself
    replaced: _Pairs = {}

    def visit(module: nn.Module, name: str) -> nn.Module:
        if module in standing:
            return standing[module]
        new = standing[module] = module  # a module stays inside its own replacement
        selector = next((one for one in policies if _selects(one, module)), None)
        if selector is not None:
            made = policies[selector](module, asked[selector])
            asked[selector] += 1
            if made is not None:
                new = made
                _refuse_if_hooks_lost(module, new, name)
                _adapt(new, module, model)
                replaced[name] = module, new
        if new is module or recurse_on_replaced:
            for key, child in [*new._modules.items()]:  # named_children() skips a module's second place
                if child is not None:
                    new.register_module(key, visit(child, f"{name}.{key}" if name else key))
        standing[module] = new
        return new

    root = visit(model, "")
    _regroup(optimizers, replaced, known, root)
    return {name: new for name, (_, new) in replaced.items()}


def _selects(selector: Selector, module: nn.Module) -> bool:
    kind = parametrize.type_before_parametrizations(module)
    return kind is selector if isinstance(selector, type) else selector(module)


def _refuse_if_hooks_lost(old: nn.Module, new: nn.Module, name: str) -> None:
    """Raise a ValueError if a module that the replacement drops has hooks or parametrizations."""
    for lost in {*old.modules()} - {*new.modules()}:
        hooks = (lost._forward_hooks, lost._forward_pre_hooks, lost._backward_hooks, lost._backward_pre_hooks)
        if parametrize.is_parametrized(lost) or any(hooks):
            kind = type(lost).__name__
            raise ValueError(
                f"module {name!r}: hooks or parametrizations of its {kind} would be lost; add them after the surgery"
            )


def _adapt(new: nn.Module, old: nn.Module, model: nn.Module) -> None:
    """Give new modules and tensors the device, dtype and mode of the module that they replace."""
    own = [*old.parameters(), *old.buffers()]
    floating = (one for one in chain(own, model.parameters(), model.buffers()) if one.is_floating_point())
    like = next(floating, torch.empty(0))
    new.to(like.device)
    for module in {*new.modules()} - {*old.modules()}:
        module.training = old.training
    for tensor in {*new.parameters(), *new.buffers()} - {*own}:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(like.dtype)


def _regroup(optimizers: Sequence[Optimizer], replaced: _Pairs, known: set[nn.Parameter], root: nn.Module) -> None:
    """Add new parameters to the groups of the replaced modules' parameters, and drop those that left the model."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for name, (old, new) in replaced.items():
        fresh = [one for one in new.parameters() if one.requires_grad and one not in known]
        own = {*old.parameters()}
        homes = groups if len(groups) == 1 else [group for group in groups if own & {*group["params"]}]
        if fresh and groups and len(homes) != 1:
            raise ValueError(
                f"module {name!r}: its new parameters belong to none or several of the {len(groups)} groups of the "
                "optimizers; give optimizers as factories, which are called after the surgery"
            )
        for group in homes:
            group["params"] = [*group["params"], *fresh]
        known = known | {*fresh}
    gone = known - {*root.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one not in gone]
        for parameter in gone & optimizer.state.keys():
            del optimizer.state[parameter]
