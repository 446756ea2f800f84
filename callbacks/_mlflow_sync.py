"""What runs left unsent, sent by hand: `python -m runner mode=sync`."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from callbacks._mlflow_delivery import Delivery
from callbacks._mlflow_spool import open_log, try_lock
from callbacks._mlflow_target import register_of
from callbacks._mlflow_writer import configure
from runner.terminal import show_path

INTERVAL = 10.0  # seconds between two words on how far a long run is


def sync(tracking_uri: str, run_dir: Path | None) -> bool:
    """Send what runs left unsent, and print how it went; whether nothing is left.

    Args:
        tracking_uri: of the store whose runs are sent.
        run_dir: a run's folder, in place of all that are not in the store as a whole; it goes where it was meant to.

    Raises:
        ValueError: nothing was ever logged to MLflow there.
    """
    if run_dir is not None and not _is_run(run_dir):
        raise ValueError(f"resume={str(run_dir)!r}: nothing was logged to MLflow there; give a run's folder")
    run_dirs = _unsent_runs(tracking_uri) if run_dir is None else [run_dir]
    if not run_dirs:
        print("MLflow: nothing is left to send")
    configure()
    results = [_send(one, wanted=run_dir is not None) for one in run_dirs]
    return all(results)


def _is_run(run_dir: Path) -> bool:
    return (run_dir / "mlflow" / "run.json").exists()


def _unsent_runs(tracking_uri: str) -> list[Path]:
    """Return folders of runs by the store's register, from which runs that are gone are removed."""
    entries = {entry: Path(entry.read_text()) for entry in sorted(register_of(tracking_uri).glob("*"))}
    for entry, run_dir in entries.items():
        if not _is_run(run_dir):
            entry.unlink(missing_ok=True)
    return [run_dir for run_dir in entries.values() if _is_run(run_dir)]


def _send(run_dir: Path, wanted: bool) -> bool:
    shown = show_path(run_dir)
    alive = try_lock(run_dir / "mlflow" / "trainer.lock")
    if alive is None:
        print(f"{shown}: is still running, and sends by itself")
        return False
    alive.close()

    terminal, said = sys.stderr, time.monotonic()
    with (run_dir / "mlflow" / "spool.jsonl").open("rb") as spool:
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
        delivery = Delivery(run_dir, report, live=False, wanted=wanted)
        while not delivery.finished:
            delivery.step()
    print(f"{shown}: MLflow has {'all' if delivery.complete else 'not all'} of it")
    return delivery.complete
