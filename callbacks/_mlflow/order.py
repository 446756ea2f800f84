"""Where a run's spool goes: written beside it, signed, and believed only where this user wrote it.

Standard library only. Of an order that somebody else wrote nothing is taken but what tells one run from another: no
address, no path. Credentials in an address reach the writer process through its pipe, and no file.
"""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runner.addresses import has_hidden, hidden_everywhere, without_credentials
from runner.callbacks._mlflow.spool import SPOOL, is_id, now_ms, read_entries
from runner.files.signing import is_signed, sign
from runner.files.whole import read_object, write_whole

FILE = "run.json"
SQLITE = "sqlite:///"


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
