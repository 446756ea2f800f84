"""Checks for packages that only some callbacks need."""

from __future__ import annotations

import importlib.util


def require(user: str, extra: str | None, *packages: str) -> None:
    """Check that packages are installed.

    `user` begins the message; `extra` installs the packages, or is None if the project itself depends on them.

    Raises:
        ImportError: a package is missing; the message says how to install it.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        what = f"'.[{extra}]'" if extra else "."
        raise ImportError(f"{user} needs {', '.join(missing)}, not installed here: pip install -e {what}")
