"""Where a run's spool goes: the address of its store, and the signed file `run.json` beside the spool.

Standard library only. From a target that someone else wrote, only ids and names are taken, never an address or a path.
Credentials reach the writer process through a pipe and are never written to a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from runner.callbacks._mlflow.description import START_KEYS, show_command
from runner.callbacks._mlflow.spool import SPOOL, is_id, read_entries
from runner.checks import check_number, check_one_of
from runner.files.addresses import HIDDEN, has_hidden, hidden_everywhere, without_credentials
from runner.files.signing import is_signed, sign
from runner.files.whole import read_object, write_whole
from runner.libraries.extras import require

FILE = "run.json"
SQLITE = "sqlite:///"
STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file", "databricks", "databricks-uc", "uc")
"""Schemes of MLflow's addresses, before a `+driver`; its plugins add others."""
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the printed address would contain the password
    # The writer retries by itself, after checking whether a call whose answer was lost has created the run. A call that
    # waits for minutes would also hold up the others.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def resolve_uri(tracking_uri: str | None) -> str:
    """Return the absolute address of the store; None means `$MLFLOW_TRACKING_URI`, or else `outputs/mlflow.db`."""
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}outputs/mlflow.db"
    database = database_of(uri)
    return uri if database is None else sqlite_uri(Path.cwd() / database) + "".join(uri.partition("?")[1:])


def sqlite_uri(database: Path) -> str:
    """Return the address of a SQLite store, with the characters quoted that SQLAlchemy would not read as its path."""
    return f"{SQLITE}{str(database).replace('%', '%25').replace('?', '%3F')}"


def database_of(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for another store."""
    return Path(unquote(uri.removeprefix(SQLITE).partition("?")[0])) if uri.startswith(SQLITE) else None


def address_for_mlflow(uri: str) -> str:
    """Return the address by which MLflow opens a store: for SQLite with quoted characters, one that names the driver.

    Otherwise MLflow would first create the database's folder, without unquoting its name.
    """
    return uri.replace("sqlite:", "sqlite+pysqlite:", 1) if uri.startswith(SQLITE) and "%" in uri else uri


def check_address(uri: str) -> None:
    """Check that MLflow supports an address, before training rather than after.

    Without a scheme it is a folder.
    """
    shown = f"tracking_uri={without_credentials(uri)!r}"
    try:
        parts = urlsplit(uri)
        host = parts.hostname
        _ = parts.port  # raises ValueError where it is not a number
    except ValueError as error:
        raise ValueError(f"{shown}: {error}; give an address such as http://127.0.0.1:5000") from None
    kind = parts.scheme.partition("+")[0]
    if kind and kind not in STORES and kind not in entry_points(group="mlflow.tracking_store").names:
        raise ValueError(
            f"{shown}: MLflow does not know this scheme; give an address that begins with {', '.join(STORES)}"
        )
    if kind in ("http", "https") and not host:
        raise ValueError(f"{shown}: names no server; give one such as http://127.0.0.1:5000")
    if kind == "sqlite" and host:
        raise ValueError(f"{shown}: must begin with three slashes, as sqlite:///folder/mlflow.db does, or four")


def check_arguments(close_timeout: float, system_metrics_interval: float) -> None:
    """Check the ranges of times, and that the package that encodes metrics is installed."""
    require("MLflowLogger", None, "orjson")
    check_number("close_timeout", close_timeout, "[0, inf]", "a number of seconds")
    check_number("system_metrics_interval", system_metrics_interval, "(0, inf]", "a number of seconds")


def check_model(log_model: str | None, register_model: str | None) -> None:
    """Check which model to log, and under which name to register it."""
    check_one_of("log_model", log_model, (None, "last", "best"))
    if register_model is not None and log_model is None:
        raise ValueError(f"register_model={register_model!r}: no model is logged; add log_model=last or best")
    if register_model is not None and (not register_model.strip() or re.search("[/:]", register_model)):
        raise ValueError(f"register_model={register_model!r}: must be a name without '/' and ':'")


def uri_of_run(uri: str, run_dir: Path) -> str:
    """Return the address of a run's store: if `uri` is the default, a resumed run stays in the store it is in."""
    target = read_target(run_dir / "mlflow")  # only one that this user wrote
    before = "" if target is None else target["tracking_uri"]
    database = database_of(before)
    exists = database is not None and database.is_file()
    is_default = "MLFLOW_TRACKING_URI" not in os.environ and uri == resolve_uri(None)
    return before if exists and is_default else uri


def ui_command(uri: str, experiment_id: str | None, run_id: str | None) -> str:
    """Return the command that opens the MLflow UI, or the run's address on its server, without the password."""
    if uri.startswith(("http://", "https://")):
        uri = re.sub(rf"{re.escape(HIDDEN)}@|\?.*", "", without_credentials(uri))  # the browser asks for the password
        known = experiment_id is not None and run_id is not None
        return f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}" if known else uri
    database = database_of(uri)
    if database is not None and database.is_relative_to(Path.cwd()):
        uri = sqlite_uri(database.relative_to(Path.cwd()))
    return f"mlflow ui --backend-store-uri {shlex.quote(without_credentials(uri))}"


def set_environment() -> None:
    """Set the environment variables that MLflow reads, unless the user has. Call it before importing MLflow."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def typed_command() -> list[str]:
    """Return the command as the user typed it, interpreter first; in a joblib job, the sweep's command."""
    if "loky" not in " ".join(sys.orig_argv[1:3]):
        return sys.orig_argv
    program = ["-m", "runner"] if Path(sys.argv[0]).parts[-2:] == ("runner", "__main__.py") else [sys.argv[0]]
    return [sys.orig_argv[0], *program, *sys.argv[1:]]


def note_command() -> str:
    """Return the command in Markdown. A block of code, which MLflow does not wrap, would push values off the page."""
    return f"`` {show_command(typed_command())} ``"


def typed_overrides() -> dict[str, str]:
    """Return the values that the user typed, by key, except those that only control how the command runs."""
    matches = (re.fullmatch(r"[+~]{0,2}([\w./]+)=(.*)", one, re.DOTALL) for one in typed_command())
    ways = {"hydra", "callbacks", "launch", *START_KEYS}
    return {one[1]: one[2] for one in matches if one and re.split("[./]", one[1])[0] not in ways}


def register_of(tracking_uri: str) -> Path:
    """Return the folder that has an entry for each run that is not sent completely to the store."""
    return (database_of(tracking_uri) or Path.cwd() / "outputs" / "mlflow.db").parent / ".mlflow_unsent"


def store_fields(tracking_uri: str, run_dir: Path) -> dict[str, Any]:
    """Return the part of a run's target that depends on its store."""
    database = database_of(tracking_uri)
    return {
        "tracking_uri": tracking_uri,
        "artifact_location": None if database is None else (database.parent / "mlartifacts").as_uri(),
        "unsent": str(register_of(tracking_uri) / hashlib.blake2b(str(run_dir).encode(), digest_size=8).hexdigest()),
    }


def make_target(
    run_dir: Path,
    before: Mapping[str, Any],
    *,
    tracking_uri: str,
    by_key: bool,
    experiment_name: str,
    run_name: str,
    system_metrics_interval: float | None,
    start_time: int,
) -> dict[str, Any]:
    """Return everything a writer needs to send a run's spool, even without the trainer.

    `before` is what `known_before` returned for an earlier session of the run, empty for a new one. Without an
    interval, no system metrics are sampled. The time is in milliseconds since 1970. `by_key` is whether the address was
    chosen in the config, rather than by the environment.
    """
    return {
        **store_fields(tracking_uri, run_dir),
        "by_key": by_key,
        "spool": before.get("spool", uuid.uuid4().hex),
        "start_time": before.get("start_time", start_time),
        "run_name": before.get("run_name", run_name),
        "experiment_name": experiment_name,
        "system_metrics_interval": system_metrics_interval,
        "command": hidden_everywhere(typed_command()),
        "cwd": str(Path.cwd()),
    }


def write_target(folder: Path, target: Mapping[str, Any]) -> None:
    """Write a target beside its spool, without credentials, for writers in later processes.

    Raises:
        OSError: the folder cannot be written to.
    """
    kept = hidden_everywhere(target)
    write_whole(folder / FILE, json.dumps(kept | {"signature": sign(_signed(kept))}))


def read_target(folder: Path) -> dict[str, Any] | None:
    """Return the target beside a spool, or None if it is missing, damaged or written by someone else."""
    target = read_object(folder / FILE)
    signature = target.pop("signature", None)
    is_own = isinstance(signature, str) and is_signed(signature.encode(), _signed(target))
    return target if is_own else None


def known_before(folder: Path) -> dict[str, Any]:
    """Return the identity of a run, perhaps someone else's, as `before` of `make_target`; empty without a spool.

    The first entry of the spool has it too, in case `run.json` is damaged.
    """
    try:
        first = next((entry for entry, _ in read_entries(folder / SPOOL) if entry is not None), {})
    except OSError:
        first = {}
    target = read_object(folder / FILE)
    spool = target.get("spool", first.get("spool"))
    start = target.get("start_time", first.get("start"))
    name = target.get("run_name")
    found: dict[str, Any] = {}
    if is_id(spool):
        found["spool"] = spool
    if type(start) is int and 0 < start < 1 << 50:
        found["start_time"] = start
    if isinstance(name, str):
        found["run_name"] = name
    return found


def with_credentials(target: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any] | None:
    """Return a target with credentials in its address, or None if it needs some and no known address has them."""
    kept = target["tracking_uri"]
    found = next((one for one in known if without_credentials(one) == kept), kept)
    return None if has_hidden(found) else {**target, "tracking_uri": found}


def _signed(target: Mapping[str, Any]) -> list[bytes]:
    return [b"mlflow/run.json", json.dumps(target, sort_keys=True).encode()]
