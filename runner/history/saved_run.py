"""Finds saved runs by folder, id or address, and reads their records, including those of other users.

The record is authoritative: its config is used as it was composed for that run, even if `conf/` has changed since.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from runner.cli.command import Command, batch_of
from runner.cli.command_line import config_dir, key_of
from runner.cli.verbs import TRAINING
from runner.config import build
from runner.config.section import sections_in
from runner.distributed.environment import keep_across_restarts
from runner.failures.checks import refuse_if
from runner.failures.crash import BUNDLE
from runner.failures.errors import WrongKey, wrong_argument
from runner.files.addresses import without_credentials
from runner.files.names import CONFIG, ENVIRONMENT, OVERRIDES
from runner.files.printable import printable
from runner.files.whole import read_object
from runner.history.mirrored import download_run, is_address, mirror_of
from runner.history.recompose import (
    CONFIG_DIR,
    changes_since,
    compose_accepted,
    composing,
    config_dir_of,
    resolved,
)
from runner.libraries.targets import find_in_working_directory
from runner.records.environment import differences
from runner.records.folder import MANIFEST, checkpoints_in, is_in_sweep, require_latest_run, run_folder_of
from runner.records.kept_code import code_to_import, import_from
from runner.records.record import OWN_LOOP, Record
from runner.records.result import read_result
from runner.records.run_files import unpacked
from runner.records.trust import check_arguments, check_credentials, check_links, check_targets
from runner.terminal.commands import show_command
from runner.terminal.console import show_path
from runner.terminal.text import print_to_stderr


@dataclass(frozen=True)
class SavedRun:
    """A run's record, in plain containers, so that launchers can send it to other processes.

    Attributes:
        typed: the name of the run, as it was typed.
        path: the named run folder or checkpoint; None if only the record was downloaded.
        run_dir: the run's folder; None if only the record was downloaded.
        config: the recorded config.
        overrides: the recorded overrides that `conf/` still accepts.
        base: the current `conf/` composed with these overrides.
        run_name: the name of the run; empty if unknown.
        config_dir: the recorded `--config-dir`, if it is used and the user typed no other.
        is_whole: whether `base` was composed from all sources of the run's config, and so makes the same choices.
        unused: recorded arguments missing from `overrides`; the next record keeps them.
        code: contents of the kept modules to import instead of the current ones, for `import_from`.
        is_own: whether this user made the record, and nobody has changed it since.
    """

    typed: str
    path: str | None
    run_dir: str | None
    config: dict[str, Any]
    overrides: list[str] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)
    run_name: str = ""
    config_dir: str | None = None
    is_whole: bool = True
    unused: list[str] = field(default_factory=list)
    code: dict[str, str] = field(default_factory=dict)
    is_own: bool = True


def find_saved_run(command: Command) -> SavedRun | None:
    """Return the run that a command uses; None if it uses no run, or if the folder to resume has no record."""
    typed = command.run
    if typed is None:
        return None
    arguments = command.overrides
    config_dir(arguments)  # a missing folder is refused before the run is searched for
    if is_address(typed):
        folder = download_run(typed, keep=command.row.trains and command.row.uses_run != "rerun")
        return _read(command, without_credentials(typed), str(folder), folder, mirror_of(typed))
    if not Path(typed).exists():
        if is_id(typed):
            return _find_by_id(command, typed)
        if "," in typed:
            raise wrong_argument("RUN", typed, "takes one run at a time")
    file = _file_of(command)
    if file is not None:
        folder = unpacked(file)
        return _read(command, typed, str(folder), folder)
    # The path is a run's folder, its folder of checkpoints, or a checkpoint.
    path = Path(typed).absolute()
    for folder in (path, *path.parents[:2]):
        if Record(folder).exists:
            return _read(command, typed, str(path), folder)
        reason = f"this run has {OVERRIDES}, but no {CONFIG}, so its experiment is unknown"
        refuse_if((folder / OVERRIDES).exists(), "RUN", typed, reason)
    if command.row.uses_run != "resume":
        reason = "no record (config.yaml) there" if path.exists() else "no such folder"
        raise wrong_argument("RUN", typed, f"{reason}; give a run's folder or its MLflow id")
    if (run_dir := run_folder_of(typed)) is not None and run_dir.is_dir():
        if command.row.needs_experiment and not _has_checkpoint(run_dir):
            reason = "holds no run, neither a record (config.yaml) nor a checkpoint"
            raise wrong_argument("RUN", typed, f"{reason}; give a run's folder or its MLflow id")
        check_links(Record(run_dir))
    return None


def _has_checkpoint(run_dir: Path) -> bool:
    """Return whether a folder without a record holds a checkpoint, complete or not.

    Runs that are started in Python have checkpoints, but no record.
    """
    with suppress(OSError):  # temporary files may disappear meanwhile
        manifests = (file for folder in ("*", "*/*") for file in run_dir.glob(f"{folder}/{MANIFEST}"))
        return any("files" in read_object(file) for file in manifests)
    return False


def with_latest(command: Command) -> Command:
    """Return a command that names the latest run by its folder instead of `latest`, and print the folder."""
    if command.run != "latest":
        return command
    run = keep_across_restarts("latest", lambda: str(require_latest_run()))  # a restart must not find this new run
    note = " (a job of a sweep: there is no other run)" if is_in_sweep(Path(run)) else ""
    print_to_stderr(f"INFO: latest: {run}{note}")
    return replace(command, words=(run, *command.words[1:]))


def from_the_start(saved: SavedRun) -> bool:
    """Return whether a run to resume ended before its first checkpoint; if so, print that it starts over."""
    if saved.run_dir is None or saved.path != saved.run_dir:
        return False
    folder = Path(saved.run_dir)
    resume = f"RUN={saved.typed!r}"
    checkpoints = checkpoints_in(folder)
    if any((checkpoint / MANIFEST).exists() for checkpoint in checkpoints):
        return False
    if checkpoints:
        raise ValueError(f"{resume}: none of its checkpoints is complete: {', '.join(map(show_path, checkpoints))}")
    result = read_result(folder)
    if result is not None and result.status == "FINISHED":
        again = show_command("rerun", saved.typed)
        raise ValueError(f"{resume}: this run has finished without a checkpoint; {again} trains it again")
    print_to_stderr(f"INFO: {resume}: ended before its first checkpoint; starting from the beginning")
    return True


def is_id(text: Any) -> bool:
    """Return whether the name of a run is an MLflow id rather than a path."""
    return re.fullmatch(r"[0-9a-f]{32}", str(text)) is not None


def _find_by_id(command: Command, run_id: str) -> SavedRun:
    """Find a run through the destinations in the user's own config, even if the command turns them off."""
    arguments = command.overrides
    typed = [argument for argument in arguments if not re.match(r"-|~callbacks|callbacks=", argument)]
    with composing():
        config: Any = OmegaConf.to_container(compose_accepted(typed, arguments)[0], resolve=True)
    callbacks = sections_in("callbacks", config.get("callbacks"))
    with TemporaryDirectory(prefix="runner-record-") as downloads:
        target = Path(downloads) if command.row.uses_run == "rerun" else None
        destinations = build.make_destinations(callbacks)
        paths = {str(path) for destination in destinations if (path := destination.find_run(run_id, target))}
        if not paths:
            raise wrong_argument("RUN", run_id, "neither a folder, nor a run in the MLflow store of this config")
        if len(paths) > 1:
            raise wrong_argument("RUN", run_id, f"matches several runs: {', '.join(sorted(paths))}; give a folder")
        folder = Path(paths.pop())
        if not Record(folder).exists:
            raise wrong_argument("RUN", run_id, "this run has no record (config.yaml), because no command made it")
        return _read(command, run_id, None if folder == target else str(folder), folder)


def _read(command: Command, typed: str, path: str | None, run_dir: Path, mirror: str = "") -> SavedRun:
    """Check the record in a folder, print what has changed since, and return the run."""
    record = Record(run_dir)
    check_links(record)
    arguments = command.overrides
    if (batch := first_batch(command)) is not None:
        record = Record.of_batch(run_dir, batch)
    try:
        config = record.config
        recorded = record.overrides
    except ValueError as error:
        raise wrong_argument("RUN", typed, str(error)) from error
    if record.verb == OWN_LOOP and command.row.needs_experiment:
        again = printable(str(record.environment.get("command", "")))
        reason = "runner.Recorder recorded this run of a custom training loop; only its own command can train it again"
        raise wrong_argument("RUN", typed, f"{reason}: {again}")
    if record.verb not in TRAINING and command.row.needs_experiment:
        trainer = config.get("trainer")
        used = trainer.get("load_path") if isinstance(trainer, dict) else None
        raise wrong_argument(
            "RUN",
            typed,
            f"this run was made by runner {printable(record.verb)} ({ENVIRONMENT}) and trained nothing; "
            f"give the run that it used: {used}",
        )
    if not record.is_own:
        print_to_stderr(f"INFO: {CONFIG} or {OVERRIDES} of {typed} was changed, or written by someone else")
    plain = [override for override in recorded if _is_plain(override)]
    directory, has_all = config_dir_of(recorded, arguments, record.is_own)
    if not (record.folder / OVERRIDES).exists():
        has_all = False  # without them, conf/ composes another experiment
        print_to_stderr(f"INFO: {typed} has no {OVERRIDES}; the recorded config is used")
    options = [*arguments, *([] if directory is None else [f"{CONFIG_DIR}={directory}"])]
    with composing():
        composed, accepted = compose_accepted(plain, options)
        code = _check(command, record, [config, OmegaConf.to_container(composed)], mirror)
        base = resolved(composed, config)
    for group in ("experiment", "sweep"):
        base.pop(group, None)
    changes = changes_since(config, base, options) if has_all else []
    for line in [*changes, *differences(record.environment)]:
        print_to_stderr(f"INFO: {line}")
    return SavedRun(
        typed=typed,
        path=path,
        run_dir=None if path is None else str(run_dir),
        config=config,
        overrides=accepted,
        base=base,
        run_name=record.run_name,
        config_dir=directory,
        is_whole=has_all and accepted == plain,
        # The next record gets this user's signature, so nothing that other people wrote may slip into it.
        unused=[override for override in recorded if override not in accepted] if record.is_own else [],
        is_own=record.is_own,
        code=code,
    )


def _check(command: Command, record: Record, configs: Sequence[Any], mirror: str) -> dict[str, str]:
    """Check that a record may be used; make the modules kept with it importable, and return those to import.

    `configs` are the recorded config and the one composed now; `mirror` is the address of the folder
    above the downloaded one, or empty if nothing was downloaded.
    """
    allowed = command.options["allow_targets"]
    check_targets(record, configs, allowed)
    find_in_working_directory(configs[0])
    may_run = record.is_own or command.options["allow_code"]
    code = code_to_import(record.folder, command.row.imports_kept_code, may_run)
    import_from(code)
    typed = [key_of(override) for override in command.overrides if not re.match(r"\+(callbacks|algorithms)=", override)]
    try:
        check_arguments(record, configs, allowed, [mirror, *command.options["allow_addresses"]], typed)
    except WrongKey as error:  # a target does not exist
        if error.key in typed:
            raise
        raise ValueError(f"{show_path(record.folder / CONFIG)}: {error}") from error
    check_credentials(record, typed)
    return code


def _file_of(command: Command) -> Path | None:
    """Return the file with a run to retrain: the named one, or the run's crash.zip if a replay names no batch."""
    if command.row.uses_run != "retrain" or command.run is None:
        return None
    if Path(command.run).is_file():
        return Path(command.run)
    crash = Path(command.run) / BUNDLE
    is_replay = "BATCH" in command.row.words and command.batch is None
    return crash if is_replay and crash.is_file() else None


def first_batch(command: Command) -> int | None:
    """Return the batch whose session's record to use; None for the newest record. A bad batch is refused later."""
    if command.row.uses_run not in ("fork", "retrain"):
        return None
    return batch_of(command.batch) or command.options.get("batch", 1)


def _is_plain(override: str) -> bool:
    """Return whether a recorded override may be used in composing the run again.

    It must not configure Hydra itself or choose a file outside the config groups. Overrides with interpolations are not
    needed, because the recorded config already has their values.
    """
    key, _, value = override.partition("=")
    group, _, package = key_of(key).partition("@")
    is_for_hydra = any(re.match(r"\s*hydra\b", part) for part in (group, package))
    is_choice = "." not in group  # a key with a dot sets a value, and chooses no file
    leads_out = ".." in key or (is_choice and ".." in re.split(r"[^\w.]+", value))
    return not (override.startswith("-") or is_for_hydra or leads_out or "${" in override)
