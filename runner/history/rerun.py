"""Makes the config of a resumed run or a rerun from that of the saved run and the overrides typed now.

Only the typed overrides change the recorded config. `conf/` is composed with the recorded overrides, then with the
typed ones as well, and the difference is applied to the recorded config.
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
    """Return the run's own overrides, except those typed again or replaced, followed by the arguments.

    The run's `--config-dir` comes last, if it is used.
    """
    kept = [override for override in saved.overrides if not any(_replaces(typed, override) for typed in arguments)]
    arguments = [f"++{argument}" if _has_only_the_record(saved, argument) else argument for argument in arguments]
    options = [] if saved.config_dir is None else [f"{CONFIG_DIR}={saved.config_dir}"]
    return merge_repeated([*kept, *arguments, *options])  # Hydra's options come last


def merge_config(saved: SavedRun, composed: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a saved run's config with the changes typed now."""
    config = _changed(saved.config, saved.base, composed)
    for override in overrides:
        # A typed value counts even if conf/ now has the same one. Other people's overrides may contradict their config.
        if (override not in saved.overrides or not saved.is_own) and not _appends(override):
            _copy(key_of(override).split("."), composed, config)
    for key in composed:
        if key not in config and key not in GROUPS:
            config[key] = composed[key]
    return config


def saved_name(command: Command, saved: SavedRun, experiment: Experiment, run_dir: Path) -> str:
    """Return the name of a resumed run, or of a rerun or fork without choices to name it by; '' otherwise."""
    if command.row.uses_run not in ("rerun", "fork"):
        return saved.run_name
    if saved.is_whole or experiment.run_name:
        return ""
    chosen = re.sub(r"^(\d+-)+|(-\d+)+$", "", saved.run_name)  # without the time and the date
    return made_name([chosen], run_dir) if chosen else ""


def made_name(chosen: Sequence[str], run_dir: Path) -> str:
    """Return the default name of a run, made of its folder and the names in `chosen`, such as model and data.

    The time comes first, because lists and charts of MLflow cut names after 20 characters.
    """
    return "-".join([run_dir.name, *chosen, run_dir.parent.name])


def arguments_to_record(saved: SavedRun | None, hydra_config: Any) -> list[str]:
    """Return the arguments for a run's record: its `--config-dir`, then its overrides.

    Arguments of the saved run that could not be used are kept. The batch where a fork begins is not part of its config.
    """
    now = [*options_of(hydra_config), *(override for override in hydra_config.overrides.task if key_of(override) != AT)]
    unused = saved.unused if saved is not None else []
    kept = [override for override in unused if not any(_replaces(typed, override) for typed in now)]
    return merge_repeated([*kept, *now])


def options_of(hydra_config: Any) -> list[str]:
    """Return the `--config-dir` options of a composed command."""
    sources = hydra_config.runtime.config_sources
    return [f"{CONFIG_DIR}={source.path}" for source in sources if source.provider == "command-line"]


def _changed(config: Any, before: Any, after: Any) -> Any:
    """Return a config with the changes between two other configs applied to it."""
    if not all(isinstance(value, Mapping) for value in (config, before, after)):
        return config if before == after else after
    same = {key: value for key, value in config.items() if key in after or key not in before}
    new = {key: value for key, value in after.items() if key not in config and value != before.get(key)}
    common = {key: _changed(same[key], before.get(key), after[key]) for key in same if key in after}
    return {**same, **common, **new}


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


def _has_only_the_record(saved: SavedRun, argument: str) -> bool:
    """Return whether an argument changes a key that the record has but `conf/` lacks.

    Either an override added the key, or `conf/` has changed.
    """

    def has(section: Any) -> bool:
        *above, key = argument.partition("=")[0].split(".")
        for part in above:
            section = section.get(part) if isinstance(section, Mapping) else None
        return isinstance(section, Mapping) and key in section

    was_added = any(override.startswith("+") and key_of(override) == key_of(argument) for override in saved.overrides)
    is_plain = re.match(r"\w[\w.]*=", argument) is not None
    return is_plain and has(saved.config) and (was_added or not has(saved.base))


def _appends(argument: str) -> bool:
    return re.match(r"\+(callbacks|algorithms)=", argument) is not None


def _replaces(typed: str, saved: str) -> bool:
    """Return whether an override makes a saved one redundant because it sets the same key or one above it."""
    if typed.startswith("~"):  # removes a key that other overrides may have to add first
        return saved.startswith("~") and key_of(typed) == key_of(saved)
    return not _appends(typed) and f"{key_of(saved)}.".startswith(f"{key_of(typed)}.")
