"""Sends unsent data of earlier runs on request: `python -m runner mode=sync`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

from runner.callbacks._mlflow.delivery import Delivery
from runner.callbacks._mlflow.description import typed_command
from runner.callbacks._mlflow.spool import SPOOL, open_log, read_sent
from runner.callbacks._mlflow.target import (
    FILE,
    known_before,
    make_target,
    read_target,
    register_of,
    set_environment,
    unsent_entry,
    with_credentials,
    write_target,
)
from runner.files.addresses import without_credentials
from runner.files.lock import lock_file
from runner.files.whole import read_object
from runner.terminal.console import show_path
from runner.terminal.text import print_to_stderr

INTERVAL = 10.0  # seconds between two progress messages for a long run
FOLDERS = ("*", "*/*", "*/*/*", "sweeps/*/*/*")  # folders of runs and sweeps in `outputs/`


def sync(fields: Mapping[str, Any], run_dir: Path | None) -> bool:
    """Send unsent data of runs, print the outcome, and return whether everything is sent.

    Args:
        fields: `tracking_uri`, `by_key` and `experiment_name` of this command, as in `make_target`. Runs go to this
            address if it was chosen for this command, in the config or, except for runs whose own address was chosen in
            theirs, by `$MLFLOW_TRACKING_URI`. Otherwise each goes to its own, and the address must be that of a run
            that someone else made. The experiment is that of runs without their own target.
        run_dir: folder of a run; None means all runs of this working directory and of the store that have unsent data.
    """
    if run_dir is not None and not _is_run(run_dir):
        raise ValueError(f"resume={str(run_dir)!r}: nothing was logged to MLflow there; give a run's folder")
    set_environment()
    if run_dir is not None:
        return _send(run_dir, _target_of(run_dir, fields), wanted=True)
    run_dirs = _unsent_runs(fields["tracking_uri"])
    if not run_dirs:
        print("MLflow: nothing left to send")
    results = []
    for folder in run_dirs:
        try:
            results.append(_send(folder, _target_of(folder, fields), wanted=False))
        except ValueError as error:
            print_to_stderr(error)
            results.append(False)
    return all(results)


def _is_run(run_dir: Path) -> bool:
    return (run_dir / "mlflow" / SPOOL).is_file()


def _target_of(run_dir: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target of a run: its own if this user wrote it and chose no other store, or one in the given store."""
    folder = run_dir / "mlflow"
    target = read_target(folder)
    address = fields["tracking_uri"]
    if target is None:
        named = read_object(folder / FILE).get("tracking_uri")
        if named is not None and named != without_credentials(address):
            raise ValueError(
                f"{folder / FILE}: this run was made by someone else or on another machine, and would be sent to "
                f"{named!r}; if you trust that, add 'callbacks.mlflow_logger.tracking_uri={named}'"
            )
        return make_target({**fields, "run_name": run_dir.name}, known_before(folder), typed_command())
    if fields["by_key"] or ("MLFLOW_TRACKING_URI" in os.environ and not target.get("by_key")):
        return {**target, "tracking_uri": address}
    whole = with_credentials(target, [address])
    if whole is None:
        raise ValueError(
            f"{folder / FILE}: this run goes to {target['tracking_uri']}, and credentials are not kept: give "
            "callbacks.mlflow_logger.tracking_uri=<the whole address>"
        )
    return whole


def _unsent_runs(tracking_uri: str) -> list[Path]:
    """Return the folders of runs with unsent data: in `outputs/`, and in the registers of it and of the store.

    Entries of runs that no longer exist are removed.
    """
    run_dirs = []
    registers = {register_of(address, Path.cwd()) for address in (tracking_uri, "")}
    for entry in [entry for register in registers for entry in register.glob("*")]:
        with suppress(FileNotFoundError):  # another process has sent it meanwhile
            run_dir = Path(entry.read_text())
            if _is_run(run_dir):
                run_dirs.append(run_dir)
            else:
                entry.unlink()
    spools = [spool for folder in FOLDERS for spool in (Path.cwd() / "outputs").glob(f"{folder}/mlflow/{SPOOL}")]
    return sorted({*run_dirs, *(spool.parents[1] for spool in spools if not _is_sent(spool.parent))})


def _is_sent(folder: Path) -> bool:
    """Return whether the store of a run has all of its spool, or someone else made the run."""
    target = read_target(folder)
    if target is None:
        return True
    sent = read_sent(folder, target["tracking_uri"])
    return sent.ended and not sent.postponed and sent.offset == (folder / SPOOL).stat().st_size


def _send(run_dir: Path, target: dict[str, Any], wanted: bool) -> bool:
    folder = run_dir / "mlflow"
    shown = show_path(run_dir)
    alive = lock_file(folder / "trainer.lock")
    if alive is None:
        print(f"{shown}: still running; it sends its data itself")
        return False
    alive.close()

    terminal = sys.stderr
    printed_at = time.monotonic()
    size = (folder / SPOOL).stat().st_size

    def report(news: dict[str, Any]) -> None:
        nonlocal printed_at
        if "offset" in news and time.monotonic() - printed_at > INTERVAL:
            printed_at = time.monotonic()
            print(f"{shown}: {min(news['offset'] / size, 1):.0%} is sent", file=terminal, flush=True)
        for name in ("error", "refused", "renamed"):
            if name in news:
                print(f"{shown}: {news[name]}", file=terminal)

    with open_log(run_dir) as log, redirect_stderr(log):  # traces go to the log, as they do in the writer
        complete = Delivery(run_dir.resolve(), target, report, live=False, wanted=wanted).run()
    print(f"{shown}: MLflow has {'all' if complete else 'not all'} of it")
    before = read_target(folder)
    if complete and before is not None:
        unsent_entry(before, run_dir.resolve()).unlink(missing_ok=True)
        write_target(folder, target)  # a resumed run continues in the store that has it
    return complete
