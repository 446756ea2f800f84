"""What ranks of a test tell each other by files, so that none has to be in time; `run_ranks` lays it beside them."""

from __future__ import annotations

import time
from pathlib import Path


def say(what: str) -> None:
    """Let all know, in the working directory that they share."""
    Path(what).touch()


def wait_for(*what: str) -> None:
    """Wait until all of it was said."""
    deadline = time.monotonic() + 120
    while not all(Path(one).exists() for one in what):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
