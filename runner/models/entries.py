"""Pick entries of a batch: positions of a tuple or list, keys of a mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument

Key = int | str
"""An entry of a batch: a position in a tuple or list, or a key of a mapping."""
Entries = Key | Sequence[Key] | Mapping[str, Key]
"""One entry, several as positional arguments, or entries by the names of keyword arguments."""


def check_entries(name: str, entries: Any) -> Any:
    """Check entries and return them unchanged; `name` is the argument that holds them, for the message.

    Raises:
        ValueError: an entry is neither an int nor a string, or there are no entries.
    """
    keys = entries.values() if isinstance(entries, Mapping) else [entries] if _is_key(entries) else entries
    is_valid = isinstance(keys, Sequence | type({}.values())) and len(keys) > 0 and all(map(_is_key, keys))
    allowed = "a position or key of the batch, such as 0 or 'image', a list of them, or a mapping {argument: key}"
    refuse_if(not is_valid, name, entries, f"must be {allowed}")
    return entries


def pick(batch: Any, entries: Entries, name: str) -> tuple[list[Any], dict[str, Any]]:
    """Return entries of a batch as positional and keyword arguments.

    Args:
        batch: a tuple, a list, a mapping, or an object whose attributes are the entries. A tensor is its own entry 0.
        entries: the entries to pick.
        name: the argument that chose them, for messages.

    Raises:
        ValueError: the batch has no such entry.
    """
    if isinstance(entries, Key):
        return [pick_entry(batch, entries, name)], {}
    if isinstance(entries, Mapping):
        return [], {argument: pick_entry(batch, key, name) for argument, key in entries.items()}
    return [pick_entry(batch, key, name) for key in entries], {}


def pick_value(batch: Any, entries: Entries, name: str) -> Any:
    """Return a single entry itself, or several in a dict, by key or by the name of their argument."""
    if isinstance(entries, Key):
        return pick_entry(batch, entries, name)
    named = entries if isinstance(entries, Mapping) else {str(key): key for key in entries}
    return {argument: pick_entry(batch, key, name) for argument, key in named.items()}


def pick_entry(batch: Any, key: Key, name: str) -> Any:
    """Return the entry of a batch at one position or key; arguments and errors as in `pick`."""
    try:
        if type(batch) in (tuple, list):
            return batch[key]
        if isinstance(key, str) and not isinstance(batch, Mapping):
            return getattr(batch, key)  # a named tuple, a dataclass, a graph
        if isinstance(batch, tuple | list | Mapping):
            return batch[key]  # type: ignore[index]
        if isinstance(batch, Tensor) and key == 0:
            return batch  # a batch of inputs alone, as in a prediction
        raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        if isinstance(batch, Mapping):
            held = f"the entries {', '.join(map(repr, batch))}"
        elif isinstance(batch, tuple | list):
            held = f"the positions 0 to {len(batch) - 1}"
        else:
            raise wrong_argument(name, key, f"the batch is a {type(batch).__name__} without this entry") from error
        raise wrong_argument(name, key, f"the batch has {held}; give one of them") from error


def _is_key(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)
