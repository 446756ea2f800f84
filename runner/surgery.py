"""Model surgery: replaces modules by others, wherever they stand in a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

Selector = type[nn.Module] | Callable[[nn.Module], bool]
"""Which modules: those of exactly this type (a subclass computes something else), or those for which it is true."""

Policy = Callable[[nn.Module, int], nn.Module | None]
"""What to put in place of a module, or None to leave it; the number counts the modules it was asked about before."""

_Pairs = dict[str, tuple[nn.Module, nn.Module]]


def replace_modules(
    model: nn.Module,
    policies: Mapping[Selector, Policy],
    optimizers: Sequence[Optimizer] = (),
    recurse_on_replaced: bool = False,
) -> dict[str, nn.Module]:
    """Return the modules that were put in, by the name of the first place where each stands now.

    Parents come before their parts, and the first selector that fits decides. A module that stands in several places
    is replaced once, for all of them. A replacement may hold the module that it replaces; one that takes over its
    parameters, rather than copies of them, keeps also their state in optimizers, `requires_grad`, and whoever shares
    them. What is new in it gets the dtype, device and mode of the module it replaces; for one without weights, the
    model's.

    Args:
        model: changed in place. Where the model itself is to be replaced, that is left to the caller: its replacement
            is in the result, under the name ''.
        policies: what to put in place of which modules.
        optimizers: those that exist already: in their groups new parameters follow those of the module replaced, and
            parameters that left the model are dropped with their state.
        recurse_on_replaced: whether to go on inside of replacements.

    Raises:
        ValueError: a module that would be lost has hooks or parametrizations; new parameters have no group to go to.
    """
    known = set(model.parameters())
    asked = dict.fromkeys(policies, 0)
    standing: dict[nn.Module, nn.Module] = {}  # what stands for each module that was visited
    replaced: _Pairs = {}

    def visit(module: nn.Module, name: str) -> nn.Module:
        if module in standing:
            return standing[module]
        new = standing[module] = module  # within its own replacement it stays
        selector = next((one for one in policies if _selects(one, module)), None)
        if selector is not None:
            made = policies[selector](module, asked[selector])
            asked[selector] += 1
            if made is not None:
                new = made
                _refuse_losses(module, new, name)
                _adapt(new, module, model)
                replaced[name] = module, new
        if new is module or recurse_on_replaced:
            for key, child in [*new._modules.items()]:  # named_children() leaves out the second place of a module
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


def _refuse_losses(old: nn.Module, new: nn.Module, name: str) -> None:
    for lost in {*old.modules()} - {*new.modules()}:
        hooks = (lost._forward_hooks, lost._forward_pre_hooks, lost._backward_hooks, lost._backward_pre_hooks)
        if parametrize.is_parametrized(lost) or any(hooks):
            kind = type(lost).__name__
            raise ValueError(f"module {name!r}: hooks or parametrizations of its {kind} would be lost; add them later")


def _adapt(new: nn.Module, old: nn.Module, model: nn.Module) -> None:
    """Give what is new the device, dtype and mode of the module that it replaces."""
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
    """Put new parameters into the groups of those of the modules replaced, and take out what left the model."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for name, (old, new) in replaced.items():
        fresh = [one for one in new.parameters() if one.requires_grad and one not in known]
        own = {*old.parameters()}
        homes = groups if len(groups) == 1 else [group for group in groups if own & {*group["params"]}]
        if fresh and groups and len(homes) != 1:
            reason = f"its new parameters belong to none or several of the {len(groups)} groups of optimizers"
            raise ValueError(f"module {name!r}: {reason}; give optimizers as factories, which are called later")
        for group in homes:
            group["params"] = [*group["params"], *fresh]
        known = known | {*fresh}
    gone = known - {*root.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one not in gone]
        for parameter in gone & optimizer.state.keys():
            del optimizer.state[parameter]
