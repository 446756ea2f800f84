"""Lets the ranks of a test wait for each other through files; `run_ranks` copies this file next to their program."""

from __future__ import annotations

import time
from pathlib import Path


def say(message: str) -> None:
    """Send a message to all ranks by creating a file of this name in their common working directory."""
    Path(message).touch()


def wait_for(*messages: str) -> None:
    """Wait until all these messages have been sent."""
    deadline = time.monotonic() + 120
    while not all(Path(message).exists() for message in messages):
        assert time.monotonic() < deadline, messages
        time.sleep(0.01)
