"""The config that a command line composes."""

from __future__ import annotations

from typing import Any

from hydra import compose

from runner.cli.catalogue import CONF
from runner.config.composed import to_plain
from runner.config.composing import initialized


def composed(*overrides: str) -> dict[str, Any]:
    """What overrides and the files of conf/ make, as plain values."""
    with initialized(CONF):
        return to_plain(compose("config", [*overrides]))
