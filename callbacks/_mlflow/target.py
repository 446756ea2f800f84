"""Where a run's spool goes: written beside it, signed, and believed only where this user wrote it.

Standard library only. Of an order that somebody else wrote nothing is taken but what tells one run from another: no
address, no path. Credentials in an address reach the writer process through its pipe, and no file.
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
from urllib.parse import urlsplit

from runner.addresses import HIDDEN, has_hidden, hidden_everywhere, without_credentials
from runner.callbacks._extra import require
from runner.callbacks._mlflow.spool import SPOOL, is_id, now_ms, read_entries
from runner.files.signing import is_signed, sign
from runner.files.whole import read_object, write_whole

FILE = "run.json"
SQLITE = "sqlite:///"
STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file", "databricks", "databricks-uc", "uc")
"""What MLflow's addresses begin with, before a `+driver`; plugins of its have others."""
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # it shows the password in an address
    # The writer itself tries again: it first looks whether the server has made a run of which it could not tell any
    # more. And a call that waits for minutes would hold up the others.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def resolve_uri(tracking_uri: str | None) -> str:
    """The address of the store, absolute; None: `$MLFLOW_TRACKING_URI`, or `outputs/mlflow.db` where we are."""
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}outputs/mlflow.db"
    return f"{SQLITE}{Path.cwd() / uri.removeprefix(SQLITE)}" if uri.startswith(SQLITE) else uri


def check_address(uri: str) -> None:
    """Raise where an address is none that MLflow knows, which would else be found when it is too late.

    Args:
        uri: as given, or as the environment has it; without a scheme it is a folder.

    Raises:
        ValueError: it is of another scheme, or names no server.
    """
    shown = f"tracking_uri={without_credentials(uri)!r}"
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{shown}: {error}; give an address such as http://127.0.0.1:5000") from None
    kind = parts.scheme.partition("+")[0]
    if kind and kind not in STORES and kind not in entry_points(group="mlflow.tracking_store").names:
        raise ValueError(f"{shown}: MLflow knows no such address; give one that begins with {', '.join(STORES)}")
    if kind in ("http", "https") and not host:
        raise ValueError(f"{shown}: names no server; give one such as http://127.0.0.1:5000")
    if kind == "sqlite" and host:
        raise ValueError(f"{shown}: must begin with three slashes, as sqlite:///folder/mlflow.db does, or four")


def check_arguments(close_timeout: float, system_metrics_interval: float) -> None:
    """Raise where times are out of range, or the package is missing that encodes metrics.

    Raises:
        ValueError: a time is out of range.
        ImportError: the package orjson is missing.
    """
    require("MLflowLogger", None, "orjson")
    if close_timeout < 0:
        raise ValueError(f"close_timeout={close_timeout!r}: must be a number of seconds, 0 or more")
    if system_metrics_interval <= 0:
        raise ValueError(f"system_metrics_interval={system_metrics_interval!r}: must be a number of seconds above 0")


def uri_of_run(uri: str, run_dir: Path) -> str:
    """The address of the store that a run goes to: in place of the default one, that which a resumed run is in."""
    order = read_order(run_dir / "mlflow")  # nobody else's
    before = "" if order is None else order["tracking_uri"]
    exists = before.startswith(SQLITE) and Path(before.removeprefix(SQLITE)).is_file()
    is_default = "MLFLOW_TRACKING_URI" not in os.environ and uri == resolve_uri(None)
    return before if exists and is_default else uri


def ui_command(uri: str, experiment_id: str | None, run_id: str | None) -> str:
    """The command that opens the MLflow UI, or the address of the run on its server; without the store's password."""
    if uri.startswith(("http://", "https://")):
        uri = re.sub(rf"{re.escape(HIDDEN)}@|\?.*", "", without_credentials(uri))  # a browser asks by itself
        known = experiment_id is not None and run_id is not None
        return f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}" if known else uri
    uri = without_credentials(uri)
    path = Path(uri.removeprefix(SQLITE))
    if uri.startswith(SQLITE) and path.is_relative_to(Path.cwd()):
        uri = f"{SQLITE}{path.relative_to(Path.cwd())}"
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


def set_environment() -> None:
    """Set what MLflow reads from the environment, where the user has not."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def typed_command() -> list[str]:
    """Return the command as the user typed it, interpreter first; in a joblib job, the sweep's command."""
    if "loky" not in " ".join(sys.orig_argv[1:3]):
        return sys.orig_argv
    program = ["-m", "runner"] if Path(sys.argv[0]).parts[-2:] == ("runner", "__main__.py") else [sys.argv[0]]
    return [sys.orig_argv[0], *program, *sys.argv[1:]]


def register_of(tracking_uri: str) -> Path:
    """The folder with an entry for each run that the store does not hold as a whole."""
    if tracking_uri.startswith(SQLITE):
        return Path(tracking_uri.removeprefix(SQLITE)).parent / ".mlflow_unsent"
    return Path.cwd() / "outputs" / ".mlflow_unsent"


def make_order(
    run_dir: Path,
    before: Mapping[str, Any],
    *,
    tracking_uri: str,
    experiment_name: str,
    run_name: str,
    system_metrics_interval: float | None,
) -> dict[str, Any]:
    """What the writer needs to know to send a run's spool, also without the trainer.

    Args:
        run_dir: the run's folder.
        before: from `known_before`, of an earlier session of the same run; empty for a new one.
        tracking_uri: the store's address.
        experiment_name: the experiment's name.
        run_name: of the run, when it is made.
        system_metrics_interval: seconds between two samples of the machine's load; None: no samples.
    """
    database = Path(tracking_uri.removeprefix(SQLITE)) if tracking_uri.startswith(SQLITE) else None
    return {
        "spool": before.get("spool", uuid.uuid4().hex),
        "start_time": before.get("start_time", now_ms()),
        "run_name": before.get("run_name", run_name),
        "tracking_uri": tracking_uri,
        "experiment_name": experiment_name,
        "artifact_location": None if database is None else (database.parent / "mlartifacts").as_uri(),
        "system_metrics_interval": system_metrics_interval,
        "command": hidden_everywhere(typed_command()),
        "cwd": str(Path.cwd()),
        "unsent": str(register_of(tracking_uri) / hashlib.blake2b(str(run_dir).encode(), digest_size=8).hexdigest()),
    }


def write_order(folder: Path, order: Mapping[str, Any]) -> None:
    """Write an order beside its spool, without credentials, for writers that come after this process.

    Raises:
        OSError: the folder cannot be written to.
    """
    kept = hidden_everywhere(order)
    write_whole(folder / FILE, json.dumps(kept | {"signature": sign(_signed(kept))}))


def read_order(folder: Path) -> dict[str, Any] | None:
    """Return the order beside a spool as this user wrote it; None where it is torn, missing, or somebody else's."""
    order = read_object(folder / FILE)
    signature = order.pop("signature", None)
    is_own = isinstance(signature, str) and is_signed(signature.encode(), _signed(order))
    return order if is_own else None


def known_before(folder: Path) -> dict[str, Any]:
    """Return what tells a run from others, whoever wrote it, for `make_order`; empty where it has no spool.

    The spool says it too: it is the truth where `run.json` was torn.
    """
    try:
        first = next((entry for entry, _ in read_entries(folder / SPOOL) if entry is not None), {})
    except OSError:
        first = {}
    order = read_object(folder / FILE)
    spool, start, name = (
        order.get("spool", first.get("spool")),
        order.get("start_time", first.get("start")),
        order.get("run_name"),
    )
    found: dict[str, Any] = {}
    if is_id(spool):
        found["spool"] = spool
    if type(start) is int and 0 < start < 1 << 50:
        found["start_time"] = start
    if isinstance(name, str):
        found["run_name"] = name
    return found


def with_credentials(order: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any] | None:
    """Return an order with its whole address, where that is among known ones; None where its credentials are not."""
    kept = order["tracking_uri"]
    found = next((one for one in known if without_credentials(one) == kept), kept)
    return None if has_hidden(found) else {**order, "tracking_uri": found}


def _signed(order: Mapping[str, Any]) -> list[bytes]:
    return [b"mlflow/run.json", json.dumps(order, sort_keys=True).encode()]
