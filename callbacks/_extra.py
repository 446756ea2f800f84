"""What is said where a package is missing that only some callbacks need."""

from __future__ import annotations

import importlib.util


def require(user: str, extra: str | None, *packages: str) -> None:
    """Do nothing where packages are installed.

    Args:
        user: who needs them, as the message begins.
        extra: of this project, which brings them; None: the project itself does.
        packages: by the names that are imported.

    Raises:
        ImportError: some are missing; they are named, and how to install them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        what = f"'.[{extra}]'" if extra else "."
        raise ImportError(f"{user} needs {', '.join(missing)}, not installed here: pip install -e {what}")
