"""Model surgery: replacing modules anywhere in a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

Selector = type[nn.Module] | Callable[[nn.Module], bool]
"""A type selects modules of exactly that type, as a subclass may compute something else; a function, those for which it
returns True."""

Policy = Callable[[nn.Module, int], nn.Module | None]
"""Returns a module's replacement, or None to keep the module; the int is the number of modules it has been asked about
before."""

_Pairs = dict[str, tuple[nn.Module, nn.Module]]


def replace_modules(
    model: nn.Module,
    policies: Mapping[Selector, Policy],
    optimizers: Sequence[Optimizer] = (),
    recurse_on_replaced: bool = False,
) -> dict[str, nn.Module]:
    """Replace modules of a model in place, and return the replacements by the name of their first place in the model.

    Parents are visited before their children, and the first matching selector decides. A module that occurs in several
    places is replaced once, in all of them. A replacement may contain the module that it replaces. If a replacement
    reuses the parameters themselves rather than copies, their optimizer state, their `requires_grad` and any sharing
    with other modules are kept. New modules and tensors in a replacement get the dtype, device and mode of the replaced
    module or, if that has no weights, the dtype and device of the model.

    Args:
        model: the model to change. If the model itself is selected, the caller must put its replacement in place, which
            the result contains under the name ''.
        policies: a policy for each selector.
        optimizers: existing optimizers. New parameters join the parameter groups of the replaced module, and parameters
            that have left the model are dropped together with their state.
        recurse_on_replaced: whether to continue inside replacements.

    Raises:
        ValueError: a module that would be lost has hooks or parametrizations, or it is unclear to which parameter group
            new parameters belong.
    """
    known = set(model.parameters())
    asked = dict.fromkeys(policies, 0)
    standing: dict[nn.Module, nn.Module] = {}  # maps each visited module to its replacement, or to itself
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
            for key, child in [*new._modules.items()]:  # named_children() skips repeated modules
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
    """Add new parameters to the parameter groups of the replaced modules, and drop parameters that left the model."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for name, (old, new) in replaced.items():
        fresh = [one for one in new.parameters() if one.requires_grad and one not in known]
        own = {*old.parameters()}
        homes = groups if len(groups) == 1 else [group for group in groups if own & {*group["params"]}]
        if fresh and groups and len(homes) != 1:
            raise ValueError(
                f"module {name!r}: its new parameters belong to none or to several of the {len(groups)} groups of the "
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
