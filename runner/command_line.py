"""The command line before Hydra sees it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

_APPEND = re.compile(r"^\+(callbacks|algorithms)=(.*)$")


def merge_repeated(arguments: Sequence[str]) -> list[str]:
    """Return arguments with repeated `+callbacks=a +callbacks=b` as one `+callbacks=[a,b]`, which Hydra understands.

    The same for algorithms. What cannot be merged (a sweep over choices, `a,b` without brackets) is left as it is.
    """
    merged: list[str] = []
    place: dict[str, int] = {}
    for argument in arguments:
        match = _APPEND.match(argument)
        names = None if match is None else _names(match[2])
        if match is None or names is None:
            merged.append(argument)
            continue
        group = match[1]
        if group in place:
            before = _names(merged[place[group]].partition("=")[2]) or []
            merged[place[group]] = f"+{group}=[{','.join([*before, *(one for one in names if one not in before)])}]"
        else:
            place[group] = len(merged)
            merged.append(argument)
    return merged


def _names(value: str) -> list[str] | None:
    """Return the names in `a` or `[a,b]`; None for anything else."""
    inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    names = [one.strip() for one in inner.split(",")]
    if (inner == value and len(names) > 1) or not all(re.fullmatch(r"[\w/@.-]+", one) for one in names):
        return None
    return names


def shadowed_packages() -> None:
    """Raise where a package in the working directory hides one of this project's.

    Raises:
        ImportError: it would be imported in its place.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("callbacks", "algorithms"):
        spec = importlib.util.find_spec(name)
        where = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if where is None or home not in where.parents:
            raise ImportError(
                f"package {name!r} is found at {where}, not in this project: a folder {name}/ with an __init__.py in "
                "the working directory hides it. Rename that folder, or run from another directory."
            )
