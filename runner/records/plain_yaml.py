"""Reads YAML that anyone may have written: only plain containers, and a limited number of values."""

from __future__ import annotations

from typing import Any

import yaml

MOST_VALUES = 100_000  # an alias counts as everything that it refers to


def load_plain(text: str) -> Any:
    """Return the content of YAML text in plain containers.

    Raises:
        ValueError: it is not YAML, or holds more than `MOST_VALUES` values.
    """
    loader = yaml.CSafeLoader(text)
    try:
        node = loader.get_single_node()
        if _size(node, {}) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error
    finally:
        loader.dispose()


def _size(node: Any, known: dict[int, float]) -> float:
    """Return the number of values that a node expands to; infinity if it contains itself."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = float("inf")
    size = 1.0
    if isinstance(node, yaml.SequenceNode):
        size += sum(_size(item, known) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_size(key, known) + _size(value, known) for key, value in node.value)
    known[id(node)] = size
    return size
