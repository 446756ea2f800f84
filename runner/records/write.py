"""Writes a run's record before its first batch, and sends it to the run's destinations.

The signature proves that this user made the record. Other people's records may name any class, and making objects from
them runs code.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from runner.checkpoints.history import read_time
from runner.cli.command import Command
from runner.cli.command_line import key_of
from runner.files.addresses import hidden_everywhere
from runner.files.names import CODE, CONFIG, ENVIRONMENT, OVERRIDES, PATCH, RECORD, SESSIONS, SIGNATURE
from runner.files.signing import sign
from runner.files.whole import write_atomically
from runner.records.environment import environment, packages_of
from runner.records.job import Job
from runner.records.kept_code import write_code
from runner.records.patch import patch
from runner.records.record import FROM_BATCH, FROM_CHECKPOINT, RUN_NAME, SIGNED, VERB, signed_code
from runner.records.secrets import is_secret, without_secrets
from runner.records.uncommitted import loose_modules
from runner.terminal.console import show_path

log = logging.getLogger("runner")


def write_record(
    run_dir: Path,
    config: dict[str, Any],
    arguments: list[str],
    origin: Mapping[str, Any] = MappingProxyType({}),
    goes_on_from: Path | None = None,
    script: Path | None = None,
) -> list[Path]:
    """Write a run's record into its folder, and return the files. Rank 0.

    An existing record is kept as that of an earlier session.

    Args:
        run_dir: the run's folder.
        config: the resolved config, as plain values.
        arguments: the overrides and options from which it was composed.
        origin: how the session began, for `environment.json`; see `describe_origin`.
        goes_on_from: the checkpoint that the run resumes from; later ones move to the folder of the earlier session.
        script: the program, if it is not this project's; it is kept if it is not committed.

    Raises:
        OSError: the folder cannot be written to.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    session = _keep_earlier(run_dir)
    if session is not None and goes_on_from is not None and goes_on_from.is_relative_to(run_dir.resolve()):
        _set_aside(goes_on_from, session)
    code = loose_modules(config, script)
    files = {
        CONFIG: yaml.safe_dump(hidden_everywhere(config), sort_keys=False).encode(),
        OVERRIDES: yaml.safe_dump(hidden_everywhere(arguments)).encode(),
        ENVIRONMENT: json.dumps({**origin, **environment(packages_of(config))}, indent=1).encode(),
    }
    changes, secrets = without_secrets(patch())
    if secrets:
        log.warning("git.patch omits files that may contain secrets: %s", ", ".join(secrets))
    if changes:
        files[PATCH] = changes
    if secrets := [name for name, content in code.items() if is_secret(name, content)]:
        log.warning("code/ omits files that may contain secrets: %s", ", ".join(secrets))
        code = {name: content for name, content in code.items() if name not in secrets}
    signature = sign([*(files[name] for name in SIGNED), *signed_code(code)])
    if signature is not None:
        files[SIGNATURE] = signature.encode()
    for name in RECORD:
        if name not in files:
            (run_dir / name).unlink(missing_ok=True)
        else:
            write_atomically(run_dir / name, files[name])
    return [*(run_dir / name for name in files), *write_code(run_dir, code)]


def log_record(logger: Any, job: Job, goes_on_from: Path | None = None) -> None:
    """Write a job's record, and send it and the job's tags to the run's destinations. All ranks."""
    from runner.distributed.ranks import get_global_rank

    if get_global_rank() == 0:
        if job.tags:
            logger.log_tags(job.tags)
        logger.log_hyperparameters(_chosen(job))
        run_dir = Path(job.run_dir)
        origin = describe_origin(job.command, job.run_name, goes_on_from)
        files = write_record(run_dir, job.experiment.plain, job.arguments, origin, goes_on_from)
        # Records of earlier sessions are sent too, but not the checkpoints that were moved there.
        files += [*run_dir.glob(f"{SESSIONS}/*/*"), *run_dir.glob(f"{SESSIONS}/*/{CODE}/**/*")]
        for path in files:
            # The earlier run may be another user's, with a link that leads elsewhere.
            if path.is_file() and path.resolve().is_relative_to(run_dir.resolve()):
                logger.log_artifact(path, str("record" / path.parent.relative_to(run_dir)))


def _chosen(job: Job) -> dict[str, Any]:
    """Return a run's choices of config groups and its typed values, by key."""
    chosen: dict[str, Any] = {group: name for group, name in job.choices.items() if name != "default"}
    for key in map(key_of, job.overrides):
        section, *parts = key.split(".")
        value: Any = hidden_everywhere(job.experiment.plain.get(section))
        for part in parts:
            value = value.get(part) if isinstance(value, Mapping) else None
        is_choice = isinstance(value, Mapping) and not parts
        if value is not None and not is_choice and section not in ("run_name", "experiment_name"):
            chosen[key] = value
    return {key: value for key, value in chosen.items() if not key.startswith("callbacks.mlflow_logger.")}


def _keep_earlier(run_dir: Path) -> Path | None:
    """Copy the record of the previous session to a folder of its own and return that; None without a record."""
    if not (run_dir / CONFIG).exists():
        return None
    sessions = run_dir / SESSIONS
    folder = sessions / str(1 + sum(1 for _ in sessions.glob("[0-9]*")))
    folder.mkdir(parents=True)
    for name in RECORD:
        with suppress(FileNotFoundError):
            shutil.copy2(run_dir / name, folder / name, follow_symlinks=False)
    with suppress(FileNotFoundError):
        shutil.copytree(run_dir / CODE, folder / CODE, symlinks=True)
    return folder


def _set_aside(goes_on_from: Path, session: Path) -> None:
    """Move checkpoints later than the one that a run resumes from to the folder of its earlier session."""
    from runner.records.set_aside import set_aside_later

    folder = session / "checkpoints"
    if names := ", ".join(set_aside_later(goes_on_from, folder)):
        reason = "checkpoints later than %s do not belong to the resumed run: moved to %s: %s"
        log.warning(reason, goes_on_from.name, show_path(folder), names)


def describe_origin(command: Command, run_name: str, goes_on_from: Path | None = None) -> dict[str, Any]:
    """Return the command, the run's name, and the checkpoint that the session begins with."""
    return {
        VERB: command.verb,
        "command": shlex.join(["python", "-m", "runner", *hidden_everywhere(command.arguments)]),
        RUN_NAME: run_name,
        FROM_CHECKPOINT: None if goes_on_from is None else str(goes_on_from),
        FROM_BATCH: 0 if goes_on_from is None else read_time(goes_on_from).batch,
    }
