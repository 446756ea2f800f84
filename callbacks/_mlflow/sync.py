"""Sends unsent data of earlier runs on request: `python -m runner mode=sync`."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from runner.callbacks._mlflow.delivery import Delivery
from runner.callbacks._mlflow.spool import SPOOL, now_ms, open_log
from runner.callbacks._mlflow.target import (
    FILE,
    known_before,
    make_target,
    read_target,
    register_of,
    set_environment,
    with_credentials,
)
from runner.files.addresses import without_credentials
from runner.files.lock import lock_file
from runner.files.whole import read_object
from runner.terminal.console import show_path
from runner.terminal.text import print_to_stderr

INTERVAL = 10.0  # seconds between two progress messages for a long run


def sync(tracking_uri: str, experiment_name: str, run_dir: Path | None) -> bool:
    """Send unsent data of runs, print the outcome, and return whether everything is sent.

    A single run is sent to its own target; if someone else made it, that must be the store at `tracking_uri`.
    `experiment_name` is for runs without their own target.

    Raises:
        ValueError: nothing was logged to MLflow in `run_dir`, or the run may not be sent to its target.
    """
    if run_dir is not None and not _is_run(run_dir):
        raise ValueError(f"resume={str(run_dir)!r}: nothing was logged to MLflow there; give a run's folder")
    run_dirs = _unsent_runs(tracking_uri) if run_dir is None else [run_dir]
    if not run_dirs:
        print("MLflow: nothing left to send")
    set_environment()
    if run_dir is not None:
        return _send(run_dir, _target_of(run_dir, tracking_uri, experiment_name), wanted=True)
    results = []
    for one in run_dirs:
        try:
            results.append(_send(one, _target_of(one, tracking_uri, experiment_name), wanted=False))
        except ValueError as error:
            print_to_stderr(error)
            results.append(False)
    return all(results)


def _is_run(run_dir: Path) -> bool:
    return (run_dir / "mlflow" / SPOOL).is_file()


def _target_of(run_dir: Path, tracking_uri: str, experiment_name: str) -> dict[str, Any]:
    """Return the target of a run: its own if this user wrote it, otherwise one in the given store.

    Raises:
        ValueError: someone else wrote the target and it names another store, or credentials are missing.
    """
    folder = run_dir / "mlflow"
    target = read_target(folder)
    if target is None:
        asked = read_object(folder / FILE).get("tracking_uri")
        if asked is not None and asked != without_credentials(tracking_uri):
            raise ValueError(
                f"{folder / FILE}: this run was made by someone else or on another machine, and would be sent to "
                f"{asked!r}; if you trust that, add 'callbacks.mlflow_logger.tracking_uri={asked}'"
            )
        fields = {"tracking_uri": tracking_uri, "experiment_name": experiment_name, "run_name": run_dir.name}
        times = {"system_metrics_interval": None, "start_time": now_ms()}
        return make_target(run_dir.resolve(), known_before(folder), **fields, **times)
    whole = with_credentials(target, [tracking_uri])
    if whole is None:
        raise ValueError(
            f"{folder / FILE}: this run goes to {target['tracking_uri']}, and credentials are not kept: give "
            "callbacks.mlflow_logger.tracking_uri=<the whole address>"
        )
    return whole


def _unsent_runs(tracking_uri: str) -> list[Path]:
    """Return the folders of unsent runs from the store's register, removing runs that no longer exist."""
    entries = {entry: Path(entry.read_text()) for entry in sorted(register_of(tracking_uri).glob("*"))}
    for entry, run_dir in entries.items():
        if not _is_run(run_dir):
            entry.unlink(missing_ok=True)
    return [run_dir for run_dir in entries.values() if _is_run(run_dir)]


def _send(run_dir: Path, target: dict[str, Any], wanted: bool) -> bool:
    shown = show_path(run_dir)
    alive = lock_file(run_dir / "mlflow" / "trainer.lock")
    if alive is None:
        print(f"{shown}: still running; it sends its data itself")
        return False
    alive.close()

    terminal = sys.stderr
    printed_at = time.monotonic()
    with (run_dir / "mlflow" / SPOOL).open("rb") as spool:
        lines = sum(1 for _ in spool)

    def report(news: dict[str, Any]) -> None:
        nonlocal printed_at
        if "lines" in news and time.monotonic() - printed_at > INTERVAL:
            printed_at = time.monotonic()
            print(f"{shown}: {news['lines']} of {lines} lines are sent", file=terminal, flush=True)
        for name in ("error", "refused", "renamed"):
            if name in news:
                print(f"{shown}: {news[name]}", file=terminal)

    with open_log(run_dir) as log, redirect_stderr(log):  # traces go to the log, as they do in the writer
        delivery = Delivery(run_dir.resolve(), target, report, live=False, wanted=wanted)
        while not delivery.finished:
            delivery.step()
    print(f"{shown}: MLflow has {'all' if delivery.complete else 'not all'} of it")
    return delivery.complete
