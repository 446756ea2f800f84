"""Lets the ranks of a test wait for each other through files; `run_ranks` copies it beside their program."""

from __future__ import annotations

import time
from pathlib import Path


def say(what: str) -> None:
    """Tell all ranks, through a file in the working directory that they share."""
    Path(what).touch()


def wait_for(*what: str) -> None:
    """Wait until all of these were said."""
    deadline = time.monotonic() + 120
    while not all(Path(one).exists() for one in what):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
