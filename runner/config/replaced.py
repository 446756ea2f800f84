"""Removes the keys that a recipe sets for a choice when the user types another choice.

Otherwise `experiment=digits_plain optimizer=adamw` would leave `optimizer.momentum`, which AdamW does not take, and an
`optimizer.lr` that was meant for SGD. A key that is typed stays, and is an error if nothing takes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from runner.cli.catalogue import CONF, chosen_in, default_choices
from runner.cli.command_line import LISTS, key_of, search_path
from runner.config.composing import initialized
from runner.config.sources import recipes_of

SINGLE = ("model", "data", "optimizer", "scheduler")
"""The groups with a single choice, which owns all keys of the group."""

Path = tuple[str, ...]


def without_replaced(
    config: DictConfig, overrides: Sequence[str], options: Sequence[str]
) -> tuple[DictConfig, list[str]]:
    """Return a config without the keys that recipes set for replaced choices, and a list of these keys.

    Args:
        config: the config, without Hydra's section.
        overrides: the overrides that it was composed with.
        options: arguments that may include a `--config-dir`.
    """
    typed = {key_of(override): override.partition("=")[2] for override in overrides if re.match(r"[\w/]+=", override)}
    if typed.keys().isdisjoint((*SINGLE, *LISTS)):
        return config, []
    recipes = recipes_of([*overrides, *options], CONF)
    if not recipes:
        return config, []
    chosen = default_choices()
    for text in reversed(recipes):
        chosen |= chosen_in(text)
    replaced = [group for group in SINGLE if group in typed and chosen.get(group) != [typed[group]]]
    lists = [group for group in LISTS if replaced or group in typed]
    contents = (OmegaConf.to_container(OmegaConf.create(text)) for text in recipes)
    keys = [key_of(override) for override in overrides if "." in key_of(override)]
    leaves = {
        leaf for content in contents for leaf in _leaves(content, (*replaced, *lists)) if not _is_typed(leaf, keys)
    }
    plain: Any = OmegaConf.to_container(config)
    dropped = {leaf for leaf in leaves if leaf[0] in replaced or "_target_" not in (_value(plain, leaf[:2]) or {})}
    if not dropped:
        return config, []
    with initialized(CONF):
        alone = compose("config", [*(f"{group}={typed[group]}" for group in replaced), *search_path(options)])
    defaults = OmegaConf.to_container(OmegaConf.masked_copy(alone, replaced))
    for leaf in dropped:
        _put_back(plain, defaults, leaf)
    return DictConfig(plain), sorted(".".join(leaf) for leaf in dropped)


def about_dropped(keys: Sequence[str]) -> str:
    """Return a message about keys that `without_replaced` removed."""
    return f"INFO: dropped the recipe's values for replaced choices: {', '.join(keys)}"


def _leaves(content: Any, sections: Collection[str]) -> Iterator[Path]:
    """Yield the paths of the values in some sections of a recipe."""

    def walk(node: Any, path: Path) -> Iterator[Path]:
        if isinstance(node, Mapping) and node:
            for key, value in node.items():
                yield from walk(value, (*path, str(key)))
        else:
            yield path

    for section in sections:
        if isinstance(content, Mapping) and isinstance(content.get(section), Mapping):
            yield from walk(content[section], (section,))


def _is_typed(leaf: Path, keys: Sequence[str]) -> bool:
    """Return whether this key, or one inside or above it, was typed."""
    name = f"{'.'.join(leaf)}."
    return any(name.startswith(f"{key}.") or f"{key}.".startswith(name) for key in keys)


def _value(node: Any, path: Path) -> Any:
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _put_back(plain: dict[str, Any], defaults: Any, leaf: Path) -> None:
    """Restore the value that a key has without a recipe, or remove the key and sections that it leaves empty."""
    *above, key = leaf
    sections = [_value(plain, leaf[:depth]) for depth in range(len(leaf))]
    if not isinstance(sections[-1], dict):
        return
    if key in (_value(defaults, tuple(above)) or {}):
        sections[-1][key] = _value(defaults, leaf)
        return
    sections[-1].pop(key, None)
    for depth in range(len(leaf) - 1, 1, -1):
        if not sections[depth] and _value(defaults, leaf[:depth]) is None:
            sections[depth - 1].pop(leaf[depth - 1], None)
