"""`conf/` as it is now, with the overrides of a run that was made before, and with the `--config-dir` of then."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.command_line import config_dir, search_path, typed_value
from runner.config.errors import CONF
from runner.runs.changes import find_changes
from runner.terminal import show_path

CONFIG_DIR = "--config-dir"
_SHOWN = 4  # differences that are listed before the rest is counted


@contextmanager
def composing() -> Iterator[None]:
    """Inside, `compose_conf` and `composable` can be called."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def compose_conf(overrides: Sequence[str], options: Sequence[str]) -> DictConfig:
    """Return `conf/` with overrides, and with a `--config-dir` where one is among the options."""
    return compose("config", [*overrides, *search_path(options)])


def composable(overrides: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the overrides that `compose_conf` takes: what they speak of may be gone."""
    with suppress(HydraException, OmegaConfBaseException):
        compose_conf(overrides, options)
        return list(overrides)
    kept: list[str] = []
    for one in overrides:
        with suppress(HydraException, OmegaConfBaseException):
            compose_conf([*kept, one], options)
            kept.append(one)
    return kept


def resolved(composed: DictConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed config as plain values; what it asks of Hydra (`${hydra:job.name}`) is as the record has it.

    Args:
        composed: from `compose_conf`, where no job of Hydra's runs that could be asked.
        config: of the record.
    """
    plain = _as_recorded(OmegaConf.to_container(composed), config)
    found: Any = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    return found


def _as_recorded(value: Any, recorded: Any) -> Any:
    if isinstance(value, dict):
        before = recorded if isinstance(recorded, Mapping) else {}
        return {key: _as_recorded(item, before.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        before = recorded if isinstance(recorded, list) and len(recorded) == len(value) else [None] * len(value)
        return [_as_recorded(*pair) for pair in zip(value, before, strict=True)]
    return recorded if isinstance(value, str) and "${hydra:" in value else value


def config_dir_of(recorded: Sequence[str], typed: Sequence[str], is_own: bool) -> tuple[str | None, bool]:
    """Return the `--config-dir` to compose a run with unasked, and whether that is all it was composed from; says so.

    Args:
        recorded: arguments of its record.
        typed: arguments of now; a `--config-dir` among them is used in place of the run's.
        is_own: whether this user made the record. Files in the directory of another one's could have Hydra itself
            make any object, before there is a config whose targets can be checked.
    """
    directory = typed_value(recorded, CONFIG_DIR)
    if directory is None or config_dir(typed) is not None:
        return None, True
    option = f"{CONFIG_DIR}={show_path(Path(directory))}, with which the run was made,"
    if not Path(directory).is_dir():
        print(f"INFO: {option} is not there; what the record says is used", file=sys.stderr)
    elif not is_own:
        trust = "the run was made by someone else, or on another machine; type it if you trust what is in it"
        print(f"INFO: {option} is not read: {trust}", file=sys.stderr)
    else:
        print(f"INFO: {option} is used again", file=sys.stderr)
        return directory, True
    return None, False


def changes_since(config: Mapping[str, Any], now: Mapping[str, Any], options: Sequence[str]) -> list[str]:
    """Return lines about where what a run was composed from has come to say something else than its record.

    Args:
        config: of the record.
        now: from `compose_conf`.
        options: with which it was composed.
    """
    changes = list(find_changes(config, now))
    if not changes:
        return []
    where = "conf/ or the --config-dir" if config_dir(options) is not None else "conf/"
    more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    listed = "; ".join(map(str, changes[:_SHOWN]))
    return [f"{where} has changed since, and what the record says is used: {listed}{more}"]
