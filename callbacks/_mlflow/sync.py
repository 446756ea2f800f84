"""What runs left unsent, sent by hand: `python -m runner mode=sync`."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from runner.addresses import without_credentials
from runner.callbacks._mlflow.delivery import Delivery
from runner.callbacks._mlflow.spool import SPOOL, open_log, try_lock
from runner.callbacks._mlflow.target import (
    FILE,
    known_before,
    make_order,
    read_order,
    register_of,
    set_environment,
    with_credentials,
)
from runner.files.whole import read_object
from runner.terminal import show_path

INTERVAL = 10.0  # seconds between two words on how far a long run is


def sync(tracking_uri: str, experiment_name: str, run_dir: Path | None) -> bool:
    """Send what runs left unsent, and print how it went; whether nothing is left.

    Args:
        tracking_uri: of the store whose runs are sent.
        experiment_name: for a run that does not say itself where it goes.
        run_dir: a run's folder, in place of all that are not in the store as a whole; it goes where it was meant to,
            and one that somebody else made only to that very store.

    Raises:
        ValueError: nothing was ever logged to MLflow there, or it may not be sent unasked.
    """
    if run_dir is not None and not _is_run(run_dir):
        raise ValueError(f"resume={str(run_dir)!r}: nothing was logged to MLflow there; give a run's folder")
    run_dirs = _unsent_runs(tracking_uri) if run_dir is None else [run_dir]
    if not run_dirs:
        print("MLflow: nothing is left to send")
    set_environment()
    if run_dir is not None:
        return _send(run_dir, _order_of(run_dir, tracking_uri, experiment_name), wanted=True)
    results = []
    for one in run_dirs:
        try:
            results.append(_send(one, _order_of(one, tracking_uri, experiment_name), wanted=False))
        except ValueError as error:
            print(error, file=sys.stderr)
            results.append(False)
    return all(results)


def _is_run(run_dir: Path) -> bool:
    return (run_dir / "mlflow" / SPOOL).is_file()


def _order_of(run_dir: Path, tracking_uri: str, experiment_name: str) -> dict[str, Any]:
    """Return where a run is sent: where this user's own order says, otherwise the store that was given, if any.

    Raises:
        ValueError: the order is somebody else's and names another store, or credentials are missing.
    """
    folder = run_dir / "mlflow"
    order = read_order(folder)
    if order is None:
        asked = read_object(folder / FILE).get("tracking_uri")
        if asked is not None and asked != without_credentials(tracking_uri):
            raise ValueError(
                f"{folder / FILE}: this run was made by someone else, or on another machine, and would be sent to "
                f"{asked!r}; if you trust that, add 'callbacks.mlflow_logger.tracking_uri={asked}'"
            )
        target = {"tracking_uri": tracking_uri, "experiment_name": experiment_name, "run_name": run_dir.name}
        return make_order(run_dir.resolve(), known_before(folder), **target, system_metrics_interval=None)
    whole = with_credentials(order, [tracking_uri])
    if whole is None:
        raise ValueError(
            f"{folder / FILE}: this run goes to {order['tracking_uri']}, and credentials are not kept: give "
            "callbacks.mlflow_logger.tracking_uri=<the whole address>"
        )
    return whole


def _unsent_runs(tracking_uri: str) -> list[Path]:
    """Return folders of runs by the store's register, from which runs that are gone are removed."""
    entries = {entry: Path(entry.read_text()) for entry in sorted(register_of(tracking_uri).glob("*"))}
    for entry, run_dir in entries.items():
        if not _is_run(run_dir):
            entry.unlink(missing_ok=True)
    return [run_dir for run_dir in entries.values() if _is_run(run_dir)]


def _send(run_dir: Path, order: dict[str, Any], wanted: bool) -> bool:
    shown = show_path(run_dir)
    alive = try_lock(run_dir / "mlflow" / "trainer.lock")
    if alive is None:
        print(f"{shown}: is still running, and sends by itself")
        return False
    alive.close()

    terminal, said = sys.stderr, time.monotonic()
    with (run_dir / "mlflow" / SPOOL).open("rb") as spool:
        lines = sum(1 for _ in spool)

    def report(news: dict[str, Any]) -> None:
        nonlocal said
        if "lines" in news and time.monotonic() - said > INTERVAL:
            said = time.monotonic()
            print(f"{shown}: {news['lines']} of {lines} lines are sent", file=terminal, flush=True)
        for name in ("error", "refused", "renamed"):
            if name in news:
                print(f"{shown}: {news[name]}", file=terminal)

    with open_log(run_dir) as log, redirect_stderr(log):  # traces, as the writer does
        delivery = Delivery(run_dir.resolve(), order, report, live=False, wanted=wanted)
        while not delivery.finished:
            delivery.step()
    print(f"{shown}: MLflow has {'all' if delivery.complete else 'not all'} of it")
    return delivery.complete
