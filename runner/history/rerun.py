"""Makes the config of a resumed run or a rerun from the saved run's config and the newly typed overrides.

Only the typed overrides change the recorded config. `conf/` is composed twice, with the recorded overrides alone and
with the typed ones added, and the difference is applied to the recorded config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.cli.command import AT, Command
from runner.cli.command_line import key_of, merge_repeated
from runner.config.composed import GROUPS
from runner.config.experiment import Experiment
from runner.history.recompose import CONFIG_DIR
from runner.history.saved_run import SavedRun


def with_saved_arguments(saved: SavedRun, arguments: Sequence[str]) -> list[str]:
    """Return the saved run's overrides, without those that the arguments replace, followed by the arguments.

    The run's `--config-dir`, if it is used, comes last.
    """
    kept = [override for override in saved.overrides if not any(_replaces(typed, override) for typed in arguments)]
    arguments = [f"++{argument}" if _is_only_in_record(saved, argument) else argument for argument in arguments]
    options = [] if saved.config_dir is None else [f"{CONFIG_DIR}={saved.config_dir}"]
    return merge_repeated([*kept, *arguments, *options])  # Hydra's options come last


def merge_config(saved: SavedRun, composed: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a saved run's config with the newly typed changes."""
    config = _changed(saved.config, saved.base, composed)
    for override in overrides:
        # A typed value wins even if conf/ now has the same value. In a run that someone else made, the overrides may
        # contradict the config.
        if (override not in saved.overrides or not saved.is_own) and not _appends(override):
            _copy(key_of(override).split("."), composed, config)
    for key in composed:
        if key not in config and key not in GROUPS:
            config[key] = composed[key]
    return config


def saved_name(command: Command, saved: SavedRun, experiment: Experiment, run_dir: Path) -> str:
    """Return the name that a run takes from the saved run; '' if its own choices or `run_name` name it.

    A resumed run keeps its name. A rerun or fork is named after the saved run only if some source of its config is
    missing, because its choices are then unknown.
    """
    if command.row.uses_run not in ("rerun", "fork"):
        return saved.run_name
    if saved.is_whole or experiment.run_name:
        return ""
    chosen = re.sub(r"^(\d+-)+|(-\d+)+$", "", saved.run_name)  # without the time and the date
    return default_name([chosen], run_dir) if chosen else ""


def default_name(chosen: Sequence[str], run_dir: Path) -> str:
    """Return a run's default name, which consists of its folder and the names of its choices, such as model and data.

    The time comes first, because MLflow's lists and charts cut names off after 20 characters.
    """
    return "-".join([run_dir.name, *chosen, run_dir.parent.name])


def arguments_to_record(saved: SavedRun | None, hydra_config: Any) -> list[str]:
    """Return the arguments for a run's record: its `--config-dir`, then its overrides.

    Arguments of the saved run that could not be used are kept. The batch at which a fork begins is left out: it is not
    part of the config.
    """
    overrides = (override for override in hydra_config.overrides.task if key_of(override) != AT)
    typed = [*options_of(hydra_config), *overrides]
    unused = saved.unused if saved is not None else []
    kept = [override for override in unused if not any(_replaces(argument, override) for argument in typed)]
    return merge_repeated([*kept, *typed])


def options_of(hydra_config: Any) -> list[str]:
    """Return the `--config-dir` options of a composed command."""
    sources = hydra_config.runtime.config_sources
    return [f"{CONFIG_DIR}={source.path}" for source in sources if source.provider == "command-line"]


def _changed(config: Any, before: Any, after: Any) -> Any:
    """Return a config with the changes between two other configs applied to it."""
    if not all(isinstance(value, Mapping) for value in (config, before, after)):
        return config if before == after else after
    kept = {key: value for key, value in config.items() if key in after or key not in before}
    new = {key: value for key, value in after.items() if key not in config and value != before.get(key)}
    common = {key: _changed(kept[key], before.get(key), after[key]) for key in kept if key in after}
    return {**kept, **common, **new}


def _copy(path: Sequence[str], source: Any, into: dict[str, Any]) -> None:
    """Copy a value from one config into another, or remove it there if the first config lacks it."""
    *sections, key = path
    for section in sections:
        source = source.get(section) if isinstance(source, Mapping) else None
        if not isinstance(source, Mapping):
            return
        into[section] = dict(into.get(section) or {})
        into = into[section]
    if key in source:
        into[key] = source[key]
    else:
        into.pop(key, None)


def _is_only_in_record(saved: SavedRun, argument: str) -> bool:
    """Return whether an argument changes a key that is in the recorded config but not in `conf/`.

    Either an override added the key, or `conf/` no longer has it.
    """

    def has(section: Any) -> bool:
        *parents, key = argument.partition("=")[0].split(".")
        for parent in parents:
            section = section.get(parent) if isinstance(section, Mapping) else None
        return isinstance(section, Mapping) and key in section

    was_added = any(override.startswith("+") and key_of(override) == key_of(argument) for override in saved.overrides)
    is_plain = re.match(r"\w[\w.]*=", argument) is not None
    return is_plain and has(saved.config) and (was_added or not has(saved.base))


def _appends(argument: str) -> bool:
    return re.match(r"\+(callbacks|algorithms)=", argument) is not None


def _replaces(typed: str, saved: str) -> bool:
    """Return whether a typed override replaces a saved one, because it sets the same key or a parent of that key."""
    if typed.startswith("~"):  # it removes a key that other overrides may have to add first
        return saved.startswith("~") and key_of(typed) == key_of(saved)
    return not _appends(typed) and f"{key_of(saved)}.".startswith(f"{key_of(typed)}.")
