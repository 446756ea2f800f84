"""The blocks that a model repeats, which are compiled, or gathered from other ranks, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with children whose class occurs at least twice in a model, by name.

    Modules that only wrap one other module, and torch's own containers, are searched instead of returned. Where a
    model of transformers names the classes of its blocks, these count too, even if there is only one.
    """
    named = {name for one in model.modules() for name in getattr(one, "_no_split_modules", None) or ()}
    counts = Counter(type(one) for one in model.modules() if _is_block(one))

    def search(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        repeats = _is_block(module) and counts[type(module)] > 1
        if repeats or not named.isdisjoint(one.__name__ for one in type(module).__mro__):
            yield name, module
            return
        for key, child in module.named_children():
            yield from search(child, f"{name}.{key}" if name else key)

    return dict(search(model, ""))


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are gathered one at a time, by name: the outermost repeated blocks.

    What only wraps a block belongs to it. A block that shares a parameter with the rest of the model is left out: it is
    gathered with the rest.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    units: dict[int, tuple[str, nn.Module]] = {}
    for name, module in find_repeated(model).items():
        while (outer := name.rpartition(".")[0]) and wraps_one(model.get_submodule(outer)):
            name = outer
            module = model.get_submodule(outer)
        inside = Counter(id(parameter) for one in module.modules() for parameter in one.parameters(recurse=False))
        if inside and all(owners[key] == count for key, count in inside.items()):
            units[id(module)] = name, module
    return dict(units.values())


def wraps_one(module: nn.Module) -> bool:
    """Return whether a module holds only one other module, and is not one of torch's containers."""
    inside = [*module.children(), *module.parameters(recurse=False)]
    return len(inside) == 1 and isinstance(inside[0], nn.Module) and not isinstance(module, CONTAINERS)


def _is_block(module: nn.Module) -> bool:
    return bool([*module.children()]) and not wraps_one(module) and not isinstance(module, CONTAINERS)
