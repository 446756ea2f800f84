"""A run that was made before: found by its folder or id, trusted or not, and begun again with what is typed now.

The record is the truth: its config is used as it was composed then, whatever `conf/` has become since. What is typed
now changes it: `conf/` is composed with the record's overrides, and again with the typed ones added; what differs
between the two is what the user wants.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner import build
from runner.command_line import key_of, merge_repeated, search_path, typed_value
from runner.composed import GROUPS, OF_THE_COMMAND
from runner.processes.launch import kept_over_restarts
from runner.records.changes import find_changes
from runner.records.record import differences
from runner.records.result import read_result
from runner.records.run_folder import MANIFEST, OUTPUTS, checkpoints_in, latest_run
from runner.records.trust import check_targets
from runner.terminal import show_path
from runner.wrong_config import CONF

_SHOWN = 4  # differences that are listed before the rest is counted


@dataclass(frozen=True)
class SavedRun:
    """A run's record, in plain containers, so that launchers can send it to other processes.

    Attributes:
        given: as typed after `resume=` or `rerun=`.
        path: the run's folder or the checkpoint that is meant; None where only the record is here.
        run_dir: the run's folder, likewise.
        config: as composed then.
        overrides: those of its overrides that `conf/` still takes.
        base: `conf/` as it is now, with these.
        run_name: the name that the run had, empty where that is not known.
    """

    given: str
    path: str | None
    run_dir: str | None
    config: dict[str, Any]
    overrides: list[str] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)
    run_name: str = ""


def find_saved_run(arguments: Sequence[str]) -> SavedRun | None:
    """Return the run that `resume=` or `rerun=` names; None without one, or where a folder to resume has no record.

    Args:
        arguments: as typed.

    Raises:
        ValueError: there is no such run, it is none to begin again, or it holds classes that nobody vouches for.
    """
    found = {key: value for key in ("resume", "rerun") if (value := typed_value(arguments, key)) is not None}
    if not found:
        return None
    if len(found) == 2:
        raise ValueError("resume= and rerun=: the one goes on with a run, the other begins it anew; give one of them")
    ((key, given),) = found.items()
    if not Path(given).exists():
        if is_id(given):
            return _find_by_id(key, given, arguments)
        if "," in given:
            raise ValueError(f"{key}={given}: takes one run at a time")
    # A run's folder, its folder of checkpoints, or one of them.
    path = Path(given).absolute()
    folder = next((up for up in (path, *path.parents[:2]) if (up / "config.yaml").is_file()), None)
    if folder is not None:
        return _read(key, given, str(path), folder, arguments)
    if key == "rerun":
        reason = "no record (config.yaml) there" if path.exists() else "no such folder"
        raise ValueError(f"rerun={given!r}: {reason}; give a run's folder or its MLflow id")
    return None


def with_latest(arguments: Sequence[str]) -> list[str]:
    """Return arguments with the folder of a run in place of `resume=latest` or `rerun=latest`, and say which it is.

    Raises:
        ValueError: there is no such run.
    """
    keys = [key for key in ("resume", "rerun") if typed_value(arguments, key) == "latest"]
    if not keys:
        return list(arguments)
    run = kept_over_restarts("latest", lambda: str(latest_run() or ""))  # by then it has been at work
    if not run:
        raise ValueError(f"{keys[0]}='latest': no run in {OUTPUTS}/ has written a checkpoint; give a run's folder")
    print(f"INFO: {keys[0]}=latest: {run}", file=sys.stderr)
    return [f"{key_of(one)}={run}" if key_of(one) in keys else one for one in arguments]


def from_the_start(saved: SavedRun) -> bool:
    """Whether a run to go on with ended before its first checkpoint, so that it is begun again in its folder; says so.

    Raises:
        ValueError: it has finished, or its checkpoints are not complete.
    """
    if saved.run_dir is None or saved.path != saved.run_dir:
        return False
    folder, resume = Path(saved.run_dir), f"resume={saved.given!r}"
    found = checkpoints_in(folder)
    if any((one / MANIFEST).exists() for one in found):
        return False
    if found:
        raise ValueError(f"{resume}: no checkpoint there is complete: {', '.join(map(show_path, found))}")
    result = read_result(folder)
    if result is not None and result.status == "FINISHED":
        raise ValueError(f"{resume}: this run has finished and left no checkpoint; rerun={saved.given} trains it again")
    print(f"INFO: {resume}: ended before its first checkpoint; it begins from the start", file=sys.stderr)
    return True


def with_saved_overrides(saved: SavedRun, arguments: Sequence[str]) -> list[str]:
    """Return arguments with the run's own overrides before them, without those that are given again or replaced."""
    kept = [one for one in saved.overrides if not any(_replaces(typed, one) for typed in arguments)]
    # After options such as -m: Hydra reads overrides on one side of them only.
    first = next(place for place, one in enumerate(arguments) if re.match(r"~|[^-][^=]*=", one))
    return merge_repeated([*arguments[:first], *kept, *arguments[first:]])


def begun_again(saved: SavedRun, composed: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a run's config with what was typed now.

    Args:
        saved: the run.
        composed: `conf/` with `overrides`, resolved.
        overrides: its own and those typed now.
    """
    config = _changed(saved.config, saved.base, composed)
    for one in overrides:
        if one not in saved.overrides and not _appends(one):
            _copy(key_of(one).split("."), composed, config)  # typed, though conf/ may say the same by now
    for key in composed:
        if key in OF_THE_COMMAND or (key not in config and key not in GROUPS):
            config[key] = composed[key]
    if config["resume"] is not None:
        config["resume"] = saved.path  # which may have been typed as an id
    elif config["rerun"] is not None:
        config["rerun"] = saved.given  # an id of digits alone is a number to Hydra
    return config


def is_id(given: Any) -> bool:
    """Whether what names a run is an id of MLflow's, and no path."""
    return re.fullmatch(r"[0-9a-f]{32}", str(given)) is not None


def _find_by_id(key: str, run_id: str, arguments: Sequence[str]) -> SavedRun:
    """Ask the destinations of the user's own config for a run, also one that now is to go without them."""
    typed = [one for one in arguments if not re.match(r"-|~callbacks|callbacks=", one)]
    with _composing():
        config: Any = OmegaConf.to_container(_compose(_composable(typed, arguments), arguments), resolve=True)
    with TemporaryDirectory(prefix="runner-record-") as downloads:
        wanted = Path(downloads) if key == "rerun" else None
        found = {str(path) for one in build.make_destinations(config) if (path := one.find_run(run_id, wanted))}
        if not found:
            raise ValueError(f"{key}={run_id!r}: neither a folder, nor a run that MLflow has where this config looks")
        if len(found) > 1:
            raise ValueError(f"{key}={run_id!r}: names several runs: {', '.join(sorted(found))}; give a folder")
        folder = Path(found.pop())
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{key}={run_id!r}: this run has no record (config.yaml); it was not made by a command")
        return _read(key, run_id, None if folder == wanted else str(folder), folder, arguments)


def _read(key: str, given: str, path: str | None, folder: Path, arguments: Sequence[str]) -> SavedRun:
    """Return the run whose record lies in a folder, once it is known that it may be used; tell what differs now."""
    config = _read_yaml(folder / "config.yaml")
    overrides = _read_yaml(folder / "overrides.yaml") or []
    environment = _read_yaml(folder / "environment.json") or {}
    if not (isinstance(config, dict) and isinstance(overrides, list) and isinstance(environment, dict)):
        raise ValueError(f"{key}={given!r}: {folder / 'config.yaml'} is no record of a run")
    if config.get("mode", "train") != "train" and typed_value(arguments, "mode") != "sync":
        raise ValueError(
            f"{key}={given!r}: this run was made by mode={config['mode']} and trained nothing; "
            f"give the one that it used: {config.get('trainer', {}).get('load_path')}"
        )
    for one in OF_THE_COMMAND:
        config.pop(one, None)
    # Of Hydra itself a record may change nothing, and whatever an override computes is in the config already.
    plain = [one for one in map(str, overrides) if not re.search(r"hydra|\$\{|\.\.|^-", one)]
    with _composing():
        kept = _composable([one for one in plain if key_of(one).partition(".")[0] not in OF_THE_COMMAND], arguments)
        composed = _compose(kept, arguments)
        check_targets(folder, [config, OmegaConf.to_container(composed)], _allowed(arguments))
        base: Any = OmegaConf.to_container(composed, resolve=True)
    for group in ("experiment", "sweep"):
        base.pop(group, None)
    for line in [*_changes_of_conf(config, base), *differences(environment)]:
        print(f"INFO: {line}", file=sys.stderr)
    return SavedRun(given, path, path and str(folder), config, kept, base, str(environment.get("run_name", "")))


@contextmanager
def _composing() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def _compose(overrides: Sequence[str], arguments: Sequence[str]) -> DictConfig:
    """Return `conf/` with overrides, where the user typed a `--config-dir` with that too."""
    return compose("config", [*overrides, *search_path(arguments)])


def _composable(overrides: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the overrides that `conf/` takes: what they speak of may be gone from it."""
    with suppress(HydraException, OmegaConfBaseException):
        _compose(overrides, arguments)
        return list(overrides)
    kept: list[str] = []
    for one in overrides:
        with suppress(HydraException, OmegaConfBaseException):
            _compose([*kept, one], arguments)
            kept.append(one)
    return kept


def _changes_of_conf(config: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Return lines about where `conf/` has come to say something else than the record."""
    changes = list(find_changes(config, base))
    if not changes:
        return []
    more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    listed = "; ".join(map(str, changes[:_SHOWN]))
    return [f"conf/ has changed since, and what the record says is used: {listed}{more}"]


def _changed(config: Any, before: Any, after: Any) -> Any:
    """Return a config with what changed from one config to another."""
    if not all(isinstance(one, Mapping) for one in (config, before, after)):
        return config if before == after else after
    same = {key: value for key, value in config.items() if key in after or key not in before}
    new = {key: value for key, value in after.items() if key not in config and value != before.get(key)}
    common = {key: _changed(same[key], before.get(key), after[key]) for key in same if key in after}
    return {**same, **common, **new}


def _copy(path: Sequence[str], source: Any, into: dict[str, Any]) -> None:
    """Let a value in a config, or its absence, be as in another config."""
    *sections, key = path
    for one in sections:
        source = source.get(one) if isinstance(source, Mapping) else None
        if not isinstance(source, Mapping):
            return
        into[one] = dict(into.get(one) or {})
        into = into[one]
    if key in source:
        into[key] = source[key]
    else:
        into.pop(key, None)


def _allowed(arguments: Sequence[str]) -> list[str]:
    found = [one for one in arguments if key_of(one) == "allow_targets"]
    value = OverridesParser.create().parse_override(found[-1]).value() if found else []
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def _appends(argument: str) -> bool:
    return re.match(r"\+(callbacks|algorithms)=", argument) is not None


def _replaces(typed: str, saved: str) -> bool:
    """Whether an override says all that another says: of the same key or a section around it."""
    if typed.startswith("~"):  # removes what others may have to add first
        return saved.startswith("~") and key_of(typed) == key_of(saved)
    return not _appends(typed) and f"{key_of(saved)}.".startswith(f"{key_of(typed)}.")


def _read_yaml(path: Path) -> Any:
    if not path.is_file():
        return None
    with path.open() as file:  # a file, not its text: errors name it
        return yaml.safe_load(file)
