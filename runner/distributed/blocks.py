"""Find the repeated blocks of a model, which are compiled, or gathered from other ranks, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with children whose class occurs at least twice in a model, by name.

    Modules that only wrap another module, and torch's own containers, are searched instead of returned. If a
    transformers model names the classes of its blocks, these are returned as well, even if they occur only once.
    """
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    counts = Counter(type(module) for module in model.modules() if _is_block(module))

    def search(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        is_repeated = _is_block(module) and counts[type(module)] > 1
        if is_repeated or not declared.isdisjoint(cls.__name__ for cls in type(module).__mro__):
            yield name, module
            return
        for key, child in module.named_children():
            yield from search(child, f"{name}.{key}" if name else key)

    return dict(search(model, ""))


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are gathered one at a time, by name: the outermost repeated blocks.

    A module that only wraps a block is returned instead of the block. A block that shares a parameter with the rest of
    the model is left out, and is gathered with the rest.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    units: dict[int, tuple[str, nn.Module]] = {}
    for name, module in find_repeated(model).items():
        while (parent := name.rpartition(".")[0]) and is_wrapper(model.get_submodule(parent)):
            name = parent
            module = model.get_submodule(parent)
        inner = Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))
        if inner and all(owners[key] == count for key, count in inner.items()):
            units[id(module)] = name, module
    return dict(units.values())


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module holds nothing but one other module, and is not one of torch's containers."""
    members = [*module.children(), *module.parameters(recurse=False)]
    return len(members) == 1 and isinstance(members[0], nn.Module) and not isinstance(module, CONTAINERS)


def _is_block(module: nn.Module) -> bool:
    return bool([*module.children()]) and not is_wrapper(module) and not isinstance(module, CONTAINERS)
