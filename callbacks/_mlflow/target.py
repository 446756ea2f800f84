"""The target of a run's spool: the MLflow store that it is sent to, recorded in a signed `run.json` next to it.

Standard library only. From a target that someone else wrote, only ids and names are used, never an address or a path.
Credentials reach the writer process through a pipe, and are never written to a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from runner.callbacks._mlflow.spool import SPOOL, is_id, now_ms, read_entries
from runner.files.addresses import HIDDEN, has_hidden, hidden_everywhere, without_credentials
from runner.files.signing import is_signed, sign
from runner.files.whole import read_object, write_atomically

FILE = "run.json"
REGISTER = Path("outputs", ".mlflow_unsent")
SQLITE = "sqlite:///"
STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file", "databricks", "databricks-uc", "uc")
"""Schemes of MLflow's addresses, without a `+driver`. Plugins add others."""
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the printed address would contain the password
    # The writer retries by itself, after checking whether a failed call created the run after all. A call that waits
    # for minutes would also hold up other calls.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def resolve_uri(tracking_uri: str | None) -> str:
    """Return the absolute address of a store. None means `$MLFLOW_TRACKING_URI`, or else `outputs/mlflow.db`."""
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}outputs/mlflow.db"
    database = database_of(uri)
    return uri if database is None else sqlite_uri(Path.cwd() / database) + "".join(uri.partition("?")[1:])


def sqlite_uri(database: Path) -> str:
    """Return the address of a SQLite store, quoting characters that SQLAlchemy would not read as part of the path."""
    return f"{SQLITE}{str(database).replace('%', '%25').replace('?', '%3F')}"


def database_of(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for other stores."""
    return Path(unquote(uri.removeprefix(SQLITE).partition("?")[0])) if uri.startswith(SQLITE) else None


def address_for_mlflow(uri: str) -> str:
    """Return an address that MLflow can open. SQLite with quoted characters needs a driver's name.

    Without it, MLflow would create the database's folder under its quoted name.
    """
    return uri.replace("sqlite:", "sqlite+pysqlite:", 1) if uri.startswith(SQLITE) and "%" in uri else uri


def check_address(uri: str) -> None:
    """Check before training that MLflow supports an address. An address without a scheme is a folder."""
    shown = f"tracking_uri={without_credentials(uri)!r}"
    try:
        parts = urlsplit(uri)
        host = parts.hostname
        _ = parts.port  # raises ValueError if it is not a number
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


def uri_of_run(uri: str, run_dir: Path) -> str:
    """Return the address of a run's store. If `uri` is the default, a resumed run stays in its store."""
    target = read_target(run_dir / "mlflow")  # None if this user did not write it
    before = "" if target is None else target["tracking_uri"]
    database = database_of(before)
    exists = database is not None and database.is_file()
    is_default = "MLFLOW_TRACKING_URI" not in os.environ and uri == resolve_uri(None)
    return before if exists and is_default else uri


def ui_command(uri: str, experiment_id: str | None, run_id: str | None) -> str:
    """Return the command that opens the MLflow UI, or a run's address on its server, without the password."""
    if uri.startswith(("http://", "https://")):
        uri = re.sub(rf"{re.escape(HIDDEN)}@|\?.*", "", without_credentials(uri))  # the browser asks for the password
        has_ids = experiment_id is not None and run_id is not None
        return f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}" if has_ids else uri
    database = database_of(uri)
    if database is not None and database.is_relative_to(Path.cwd()):
        uri = sqlite_uri(database.relative_to(Path.cwd()))
    return f"mlflow ui --backend-store-uri {shlex.quote(without_credentials(uri))}"


def set_environment() -> None:
    """Set the environment variables that MLflow reads, unless the user set them. Call this before importing MLflow."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def artifact_location(tracking_uri: str) -> str | None:
    """Return the location of an experiment's artifacts: next to a SQLite store; None leaves it to the server."""
    database = database_of(tracking_uri)
    return None if database is None else (database.parent / "mlartifacts").as_uri()


def unsent_entry(run_dir: Path, working_dir: str) -> Path:
    """Return a run's entry in the register of unsent runs in `working_dir`, the folder in which it was started."""
    return Path(working_dir) / REGISTER / hashlib.blake2b(str(run_dir).encode(), digest_size=8).hexdigest()


def unsent_runs(register: Path) -> list[Path]:
    """Return the folders of the runs in a register, and remove entries of runs that no longer exist."""
    run_dirs = []
    for entry in sorted(register.glob("[!.]*")):
        with suppress(OSError, ValueError):  # sent in the meantime by another process, or not readable
            run_dir = Path(entry.read_text())
            if (run_dir / "mlflow" / SPOOL).is_file():
                run_dirs.append(run_dir)
            else:
                entry.unlink()
    return run_dirs


def make_target(fields: Mapping[str, Any], before: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Return everything that a sender must know to send a run after its trainer has ended.

    Args:
        fields: `tracking_uri` with credentials; `by_key`, whether the config rather than the environment set it;
            `experiment_name`; `run_name`; and optionally `start_time` in milliseconds since 1970,
            `system_metrics_interval` in seconds and `max_values_per_second`.
        before: the result of `read_identity` for an earlier session of the run; empty for a new run.
        command: the command that trains.
    """
    defaults = {"spool": uuid.uuid4().hex, "start_time": now_ms(), "system_metrics_interval": None}
    origin = {"command": hidden_everywhere(command), "cwd": str(Path.cwd())}
    return {**defaults, **fields, **before, **origin}


def write_target(folder: Path, target: Mapping[str, Any]) -> None:
    """Write a target next to its spool, without credentials, for senders in later processes.

    Raises:
        OSError: the file cannot be written.
    """
    public = hidden_everywhere(target)
    write_atomically(folder / FILE, json.dumps(public | {"signature": sign(_signed_parts(public))}))


def read_target(folder: Path) -> dict[str, Any] | None:
    """Return the target next to a spool, or None if it is missing, damaged or written by someone else."""
    target = read_object(folder / FILE)
    signature = target.pop("signature", None)
    is_own = isinstance(signature, str) and is_signed(signature.encode(), _signed_parts(target))
    return target if is_own else None


def read_identity(folder: Path) -> dict[str, Any]:
    """Return the identity of a run, perhaps someone else's, for `before` of `make_target`; empty for a new run.

    It is in the first line of the spool, or only in the target if the trainer was killed before it wrote that line.
    """
    first: dict[str, Any] = {}
    with suppress(OSError):
        first = next((entry for entry, _ in read_entries(folder / SPOOL) if entry is not None), {})
    in_spool = {"spool": first.get("spool"), "start_time": first.get("start"), "run_name": first.get("name")}
    target = read_object(folder / FILE)
    checks: dict[str, Any] = {"spool": is_id, "run_name": lambda name: isinstance(name, str)}
    checks["start_time"] = lambda time: type(time) is int and 0 < time < 1 << 50
    identity = {key: value if checks[key](value) else target.get(key) for key, value in in_spool.items()}
    return {key: value for key, value in identity.items() if checks[key](value)}


def is_copy(folder: Path, other: Path) -> bool:
    """Return whether the `mlflow/` folders of two runs hold copies of one spool."""
    try:
        if not other.is_dir() or (folder.is_dir() and other.samefile(folder)):
            return False
        spools = [read_object(each / FILE).get("spool") for each in (folder, other)]
    except OSError:  # the other folder belongs to someone else, for example
        return False
    return spools[0] is not None and spools[0] == spools[1]


def with_credentials(target: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any] | None:
    """Return a target with credentials in its address, or None if it needs some and the known addresses lack them."""
    recorded = target["tracking_uri"]
    uri = next((address for address in known if without_credentials(address) == recorded), recorded)
    return None if has_hidden(uri) else {**target, "tracking_uri": uri}


def _signed_parts(target: Mapping[str, Any]) -> list[bytes]:
    return [b"mlflow/run.json", json.dumps(target, sort_keys=True).encode()]
