"""Whether a command is a sweep, without composing its config to find out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.hydra import Hydra

from runner.config.command_line import key_of


@contextmanager
def composed_once(arguments: Sequence[str]) -> Iterator[None]:
    """Let Hydra compose the config of a command once within the `with` block.

    Otherwise Hydra composes it twice, the first time only to read `hydra.mode`, which takes as long as the second. Only
    what is typed and config files of the user's own can set that key; with either of them, nothing changes.

    Args:
        arguments: the arguments of the command line.
    """
    setting = ("hydra", "hydra.mode", "hydra.searchpath")
    if any(one.startswith(("--config", "-c")) or key_of(one) in setting for one in arguments):
        yield
        return
    get_mode = Hydra.get_mode
    Hydra.get_mode = _unset  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = get_mode  # type: ignore[method-assign]


def _unset(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Return the value that `hydra.mode` has by default; whether `-m` was typed then decides."""
    return None
