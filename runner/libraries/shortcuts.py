"""Shortcuts around other libraries: faster than their public ways, by private names or by what they do not promise.

Each is a function in this folder, beside the public way. `RUNNER_PUBLIC_ONLY=1` takes the public way everywhere, with
the same numbers: to find out whether a shortcut is at fault after an upgrade. A list of names, such as
`RUNNER_PUBLIC_ONLY=backward,exit`, does so for these alone. docs/private_names.md says what each saves.
"""

from __future__ import annotations

import os

NAMES = ("backward", "collector", "composing", "exit", "optimizer", "compiler", "torchmetrics", "metrics")


def is_taken(name: str) -> bool:
    """Return whether a shortcut of `NAMES` is taken."""
    given = os.environ.get("RUNNER_PUBLIC_ONLY", "")
    public = given.split(",")
    return name not in public if {*public} <= {*NAMES} else given in ("", "0")
