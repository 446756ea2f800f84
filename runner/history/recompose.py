"""Composes the current `conf/` with the overrides of a saved run and the `--config-dir` that it used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.cli.catalogue import CONF
from runner.cli.command import CONFIG_DIR
from runner.cli.command_line import config_dir, search_path, typed_value
from runner.comparing.changes import find_changes
from runner.config.composing import initialized
from runner.config.length import unmeasured
from runner.config.replaced import without_replaced
from runner.terminal.console import show_path
from runner.terminal.text import print_to_stderr

_SHOWN = 4  # differences to list; the others are counted


def composing() -> AbstractContextManager[None]:
    """Return a context in which `compose_conf` and `compose_accepted` can be called."""
    return initialized(CONF)


def compose_conf(overrides: Sequence[str], options: Sequence[str]) -> DictConfig:
    """Return `conf/` composed with overrides, and with the `--config-dir` if the options have one."""
    composed = compose("config", [*overrides, *search_path(options)])
    return without_replaced(composed, overrides, options)[0]


def compose_accepted(overrides: Sequence[str], options: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Compose `conf/` with the overrides that it still accepts, and return both; keys of the others may be gone."""
    with suppress(HydraException, OmegaConfBaseException):
        return compose_conf(overrides, options), list(overrides)
    accepted: list[str] = []
    for override in overrides:
        with suppress(HydraException, OmegaConfBaseException):
            compose_conf([*accepted, override], options)
            accepted.append(override)
    return compose_conf(accepted, options), accepted


def resolved(composed: DictConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed config as plain values; values that depend on Hydra's job come from the recorded `config`."""
    plain = _as_recorded(OmegaConf.to_container(composed), config)
    values: Any = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    return values


def _as_recorded(value: Any, recorded: Any) -> Any:
    if isinstance(value, dict):
        before = recorded if isinstance(recorded, Mapping) else {}
        return {key: _as_recorded(item, before.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        before = recorded if isinstance(recorded, list) and len(recorded) == len(value) else [None] * len(value)
        return [_as_recorded(*pair) for pair in zip(value, before, strict=True)]
    return recorded if isinstance(value, str) and "${hydra:" in value else value


def config_dir_of(recorded: Sequence[str], typed: Sequence[str], is_own: bool) -> tuple[str | None, bool]:
    """Return the recorded `--config-dir` to compose with, if any, and print whether it is used.

    The directory of another user's run is not read: its files could make Hydra create any object before there is a
    config whose targets can be checked.

    Returns:
        The directory, or None to compose without it; and whether that includes all files of the run's config.
    """
    directory = typed_value(recorded, CONFIG_DIR)
    if directory is None or config_dir(typed) is not None:
        return None, True
    option = f"{CONFIG_DIR}={show_path(Path(directory))} of the run"
    if not Path(directory).is_dir():
        print_to_stderr(f"INFO: {option} does not exist; the recorded config is used")
    elif not is_own:
        trust = "the run was made by someone else, or on another machine; type the option if you trust that directory"
        print_to_stderr(f"INFO: {option} is not read: {trust}")
    else:
        print_to_stderr(f"INFO: {option} is used again")
        return directory, True
    return None, False


def changes_since(config: Mapping[str, Any], now: Mapping[str, Any], options: Sequence[str]) -> list[str]:
    """List, in one line, what has changed in `conf/` since a run was recorded; return an empty list if nothing has."""
    changes = list(find_changes(unmeasured(config), unmeasured(now)))
    if not changes:
        return []
    source = "conf/ or the --config-dir" if config_dir(options) is not None else "conf/"
    more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    listed = "; ".join(map(str, changes[:_SHOWN]))
    return [f"{source} has changed since the run was recorded; the recorded config is used: {listed}{more}"]
