"""Sends spools: in the writer process of a trainer, or for `runner sync` without a trainer.

MLflow is imported only after its environment is set.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner.callbacks._mlflow.delivery import Delivery
from runner.callbacks._mlflow.spool import SPOOL, has_trainer, open_log, read_sent
from runner.callbacks._mlflow.target import (
    FILE,
    REGISTER,
    make_target,
    read_identity,
    read_target,
    resolve_uri,
    set_environment,
    unsent_entry,
    unsent_runs,
    with_credentials,
    write_target,
)
from runner.distributed.signals import HANDLED
from runner.failures.errors import wrong_argument
from runner.files.addresses import without_credentials
from runner.files.whole import read_object
from runner.libraries.importing import importing
from runner.terminal.commands import typed_command
from runner.terminal.console import show_path
from runner.terminal.text import print_to_stderr

POLL = 0.2  # seconds between two checks that the trainer is alive
LINGER = 6.0  # seconds to finish after the trainer has ended; a process that stays longer looks like a leftover
GRACE = 1.0  # further seconds before the process exits even in the middle of a call
INTERVAL = 10.0  # seconds between two progress messages of `sync` for a long run
FOLDERS = ("*", "*/*", "*/*/*", "sweeps/*/*/*")  # folders of runs and sweeps in `outputs/`


def serve() -> None:
    """Serve the trainer that started this process, until it has ended and everything is sent."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)  # a job's processes all get signals, but this one outlives the trainer
    # At this priority the writer still gets a quarter of a core that it shares with training. At a lower one, it would
    # send nothing for minutes on a busy machine.
    os.nice(5)
    set_environment()
    trainer = os.getppid()
    pipe = os.dup(1)
    os.dup2(2, 1)  # keep the output of libraries out of the reports
    writing = threading.Lock()

    def report(news: dict[str, Any]) -> None:
        with writing, contextlib.suppress(OSError):  # the trainer may have ended
            os.write(pipe, json.dumps(news).encode() + b"\n")

    writer = Writer(trainer, report)
    threading.Thread(target=writer.watch, daemon=True).start()
    with importing(), contextlib.suppress(Exception):  # errors are reported once there is a run
        importlib.import_module("runner.callbacks._mlflow.sink")
        importlib.import_module("runner.callbacks._mlflow.store").open_early(resolve_uri(None))
    with contextlib.suppress(ValueError):  # the trainer was killed in the middle of a line
        for line in sys.stdin:
            writer.execute(**json.loads(line))
    writer.leave()


class Writer:
    """Delivers the runs of a trainer, each on its own thread, and then runs that other writers left unsent."""

    def __init__(self, trainer: int, report: Callable[[dict[str, Any]], None]) -> None:
        self._trainer = trainer
        self._report = report
        # Unfinished deliveries by number. Number -1 is a run that an earlier writer left unsent.
        self._deliveries: dict[int, Delivery] = {}
        self._threads: list[threading.Thread] = []
        self._addresses: list[str] = []
        self._handled: set[Path] = set()  # runs to skip in the register
        self._sending_leftovers = threading.Lock()

    def execute(self, number: int, run_dir: str = "", target: dict[str, Any] | None = None) -> None:
        """Start a delivery if there is a target; otherwise finish the delivery with this number."""
        folder = Path(run_dir)
        if target is None:
            if delivery := self._deliveries.get(number):
                delivery.finish()
            return
        earlier = [delivery for delivery in list(self._deliveries.values()) if delivery.run_dir == folder]
        for delivery in earlier:  # for earlier sessions of the run
            delivery.abandon()

        def report(news: dict[str, Any]) -> None:
            self._report({"number": number, **news})

        try:
            with open_log(folder) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        except OSError as error:
            report({"error": str(error), "stopped": True})
            return
        self._addresses.append(target["tracking_uri"])
        self._handled.add(folder)
        self._deliveries[number] = Delivery(folder, target, report, live=True)
        if os.getppid() != self._trainer:
            self._deliveries[number].finish()
        arguments = (number, Path(target["cwd"]), earlier)
        thread = threading.Thread(target=self._deliver, args=arguments, daemon=True)
        thread.start()
        self._threads = [thread, *(other for other in self._threads if other.is_alive())]

    def watch(self) -> None:
        """Exit a few seconds after the trainer has ended, even in the middle of a call that gets no answer.

        Standard input may stay open, because data workers can outlive the trainer and hold its other end.
        """
        while os.getppid() == self._trainer:
            time.sleep(POLL)
        self._finish()
        time.sleep(LINGER + GRACE)
        os._exit(1)  # the next writer continues after the last recorded send

    def leave(self) -> None:
        """Exit once everything is sent or time is up, because the trainer has ended or no longer needs this process."""
        deadline = time.monotonic() + LINGER
        self._finish()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        os._exit(0)  # do not wait for calls that hang

    def _finish(self) -> None:
        for delivery in list(self._deliveries.values()):
            delivery.finish()

    def _deliver(self, number: int, working_dir: Path, earlier: list[Delivery]) -> None:
        """Deliver a run once its earlier deliveries have ended, and then runs that other writers left unsent."""
        for delivery in earlier:
            delivery.stopped.wait()
        try:
            self._deliveries[number].run()
        finally:
            del self._deliveries[number]
        with self._sending_leftovers:
            for run_dir in unsent_runs(working_dir / REGISTER):
                if run_dir not in self._handled:
                    self._handled.add(run_dir)
                    with contextlib.suppress(OSError):
                        self._send_leftover(run_dir, working_dir)

    def _send_leftover(self, run_dir: Path, working_dir: Path) -> None:
        """Deliver a run of this user that an earlier writer left unsent, unless its trainer is alive."""
        target = read_target(run_dir / "mlflow")
        target = target and with_credentials(target, self._addresses)
        if not target or has_trainer(run_dir):
            return
        delivery = self._deliveries[-1] = Delivery(run_dir, target, lambda _: None, live=False, restore=False)
        try:
            is_complete = delivery.run()
        finally:
            del self._deliveries[-1]
        if is_complete:  # its last session may have been started in another folder, which has its own register
            unsent_entry(run_dir, str(working_dir)).unlink(missing_ok=True)


def sync(fields: Mapping[str, Any], run_dir: Path | None) -> bool:
    """Send unsent data of runs, print the outcome, and return whether everything is sent.

    Args:
        fields: `tracking_uri`, `by_key` and `experiment_name` of this command, as in `make_target`. The address
            replaces a run's own if this command's config sets it. `$MLFLOW_TRACKING_URI` replaces it only if the run's
            own was not set in a config. If someone else made the run, the address must match the recorded one, if any.
            `experiment_name` is used for runs that have no target.
        run_dir: folder of a run; None means all runs of this working directory with unsent data.
    """
    if run_dir is not None and not (run_dir / "mlflow" / SPOOL).is_file():
        raise wrong_argument("RUN", str(run_dir), "nothing was logged to MLflow there; give a run's folder")
    set_environment()
    if run_dir is not None:
        return _send(run_dir, _target_of(run_dir, fields), restore=True)
    run_dirs = _unsent_runs()
    if not run_dirs:
        print("MLflow: nothing left to send")
    results = []
    for folder in run_dirs:
        try:
            results.append(_send(folder, _target_of(folder, fields), restore=False))
        except ValueError as error:
            print_to_stderr(error)
            results.append(False)
    return all(results)


def _target_of(run_dir: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's target if this user wrote it, perhaps with a newly chosen address; otherwise a new target."""
    folder = run_dir / "mlflow"
    target = read_target(folder)
    address = fields["tracking_uri"]
    if target is None:
        recorded = read_object(folder / FILE).get("tracking_uri")
        if recorded is not None and recorded != without_credentials(address):
            raise ValueError(
                f"{folder / FILE}: this run was made by someone else or on another machine, and would be sent to "
                f"{recorded!r}; if you trust that, add 'callbacks.mlflow_logger.tracking_uri={recorded}'"
            )
        return make_target({**fields, "run_name": run_dir.name}, read_identity(folder), typed_command())
    if fields["by_key"] or ("MLFLOW_TRACKING_URI" in os.environ and not target.get("by_key")):
        return {**target, "tracking_uri": address}
    complete = with_credentials(target, [address])
    if complete is None:
        raise ValueError(
            f"{folder / FILE}: this run goes to {target['tracking_uri']}, and credentials are not kept: give "
            "callbacks.mlflow_logger.tracking_uri=<the whole address>"
        )
    return complete


def _unsent_runs() -> list[Path]:
    """Return the folders of runs with unsent data, which are in `outputs/` or in the register."""
    spools = [spool for folder in FOLDERS for spool in Path.cwd().glob(f"outputs/{folder}/mlflow/{SPOOL}")]
    unsent = [spool.parents[1] for spool in spools if not _is_sent(spool.parent)]
    return sorted({*unsent, *unsent_runs(Path.cwd() / REGISTER)})


def _is_sent(folder: Path) -> bool:
    """Return whether the store has a run's whole spool. For a run that someone else made, return True."""
    target = read_target(folder)
    if target is None:
        return True
    sent = read_sent(folder, target["tracking_uri"])
    return sent.ended and not sent.postponed and sent.offset == (folder / SPOOL).stat().st_size


def _send(run_dir: Path, target: dict[str, Any], restore: bool) -> bool:
    """Send a run's unsent data, print the outcome, and return whether everything is sent."""
    folder = run_dir / "mlflow"
    shown = show_path(run_dir)
    if has_trainer(run_dir):
        print(f"{shown}: still running; it sends its data itself")
        return False
    terminal = sys.stderr
    printed_at = time.monotonic()
    size = max((folder / SPOOL).stat().st_size, 1)

    def report(news: dict[str, Any]) -> None:
        nonlocal printed_at
        if "offset" in news and time.monotonic() - printed_at > INTERVAL:
            printed_at = time.monotonic()
            print(f"{shown}: {min(news['offset'] / size, 1):.0%} sent", file=terminal, flush=True)
        for name in ("error", "refused", "renamed"):
            if name in news:
                print(f"{shown}: {news[name]}", file=terminal)

    with open_log(run_dir) as log, contextlib.redirect_stderr(log):  # traces go to the log, as in the writer
        complete = Delivery(run_dir.resolve(), target, report, live=False, restore=restore).run()
    print(f"{shown}: {'everything' if complete else 'not everything'} is in MLflow")
    if complete:
        unsent_entry(run_dir.resolve(), str(Path.cwd())).unlink(missing_ok=True)  # if a session was started here
        if read_target(folder) is not None:
            write_target(folder, target)  # a resumed run continues in this store
    return complete
