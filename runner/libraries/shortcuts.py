"""Shortcuts around other libraries: faster than their public API, but based on private names or undocumented behavior.

Each is a function in this folder, next to one that uses the public API. `RUNNER_PUBLIC_ONLY=1` uses the public API
everywhere, with the same results, to find out whether a shortcut is at fault after an upgrade. A list of names, such as
`RUNNER_PUBLIC_ONLY=backward,exit`, turns off only these shortcuts. docs/private_names.md says how much each saves.
"""

from __future__ import annotations

import os

NAMES = ("backward", "collector", "composing", "exit", "optimizer", "compiler", "torchmetrics", "metrics")


def is_enabled(name: str) -> bool:
    """Return whether a shortcut of `NAMES` is enabled."""
    setting = os.environ.get("RUNNER_PUBLIC_ONLY", "")
    public = setting.split(",")
    return name not in public if {*public} <= {*NAMES} else setting in ("", "0")
