"""Packages that only some features need, and how to install them."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path


def require(user: str, extra: str | None, *packages: str) -> None:
    """Check that packages are installed.

    `user` is the subject of the message; `extra` installs the packages, or is None if the project itself needs them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{user} needs {', '.join(missing)}, not installed here: {how_to_install(extra)}")


def how_to_install(extra: str | None) -> str:
    """Return the command that installs an extra of this project, from its checkout if there is one."""
    suffix = f"[{extra}]" if extra else ""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'exactrun{suffix}')}"
    source = "." if checkout == Path.cwd().resolve() else checkout
    return f"pip install -e {shlex.quote(f'{source}{suffix}')}"
