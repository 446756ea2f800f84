"""Where a run goes: the address, what the writer is told, how a person gets there. Standard library only."""

from __future__ import annotations

import os
import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from runner.addresses import HIDDEN, without_credentials
from runner.callbacks._extra import require
from runner.callbacks._mlflow.order import SQLITE, read_order

STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file", "databricks", "databricks-uc", "uc")
"""What MLflow's addresses begin with, before a `+driver`; plugins of its have others."""


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
