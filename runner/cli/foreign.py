"""Translates keys of other libraries into this project's, with the list in `foreign_keys.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from runner.cli.nearest import Advice

OURS = ("model", "callbacks", "algorithms", "launch", "vars", "hydra")
"""Sections whose keys may belong to a user's own class, and mean something else."""


def about_foreign(key: str, value: Any = None) -> Advice | None:
    """Return advice on what to write instead of another library's key, or None for an unknown key.

    The key is given in full; for the choice of a group it is `group=choice`.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            if (advice := about_foreign(f"{key}.{name}", item)) is not None:
                return Advice(f"for {key}.{name} ") + advice
        value = None
    row = _row(key)
    if row is None:
        return None
    shown = "..." if value is None or str(value).startswith("[") else str(value)  # no advice fits a list
    text = row.get("values", {}).get(shown.lower(), row.get("write", ""))
    if shown[-1:].isalpha():  # a time keeps its own unit
        text = text.replace("{}ba", "{}").replace("{}ep", "{}")
    text = text.replace("{}", shown)
    if text.startswith(f"{key}="):  # the key exists here, just not in this run
        return None
    note = row.get("note", "").replace("{}", shown)
    return Advice("; ".join(filter(None, [text and f"write {text}", note]))).with_facts(fix=_as_argument(text))


def about_foreign_value(key: str, value: Any) -> Advice | None:
    """Return advice on what to write instead of another library's value, or None for an unknown value."""
    text = _table().get(key, {}).get("values", {}).get(str(value).lower())
    return Advice(f"write {text}").with_facts(fix=_as_argument(text)) if text else None


def _as_argument(text: str) -> str:
    """Return a text if it is a single argument to type unchanged, else ''."""
    return text if "=" in text and " " not in text and "..." not in text and "<" not in text else ""


def _row(key: str) -> dict[str, Any] | None:
    """Return the row of a key, or of its last part unless the section may have keys of users' classes."""
    section, _, inner = key.partition(".")
    if inner and "=" not in key and section not in OURS:
        names = (key, f"{section}.*", inner.rpartition(".")[2])
        return next((_table()[name] for name in names if name in _table()), None)
    return _table().get(key)


@cache
def _table() -> dict[str, dict[str, Any]]:
    """Return the rows of the table by their keys."""
    rows = yaml.load((Path(__file__).parent / "foreign_keys.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    return {key: {"write": row} if isinstance(row, str) else row for key, row in rows.items()}
