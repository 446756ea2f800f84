"""The writer process: reads commands from its standard input and sends the spools of runs to MLflow.

MLflow is imported only after `serve` has set its environment.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.callbacks._mlflow.delivery import Delivery
from runner.callbacks._mlflow.spool import SPOOL, open_log
from runner.callbacks._mlflow.target import read_target, resolve_uri, set_environment, unsent_entry, with_credentials
from runner.distributed.signals import HANDLED
from runner.files.lock import lock_file
from runner.libraries.importing import importing

POLL = 0.2  # seconds between two looks whether the trainer is alive
LINGER = 6.0  # seconds to finish after the trainer has ended; users may take a longer-lived process for a leftover
GRACE = 1.0  # further seconds before the process exits in the middle of a call


def serve() -> None:
    """Serve the trainer that started this process until it has ended and everything is sent."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a job: this one must outlive the trainer
    os.nice(5)  # a quarter of a core that training wants too: less, and on a busy machine nothing is sent for minutes
    set_environment()
    trainer = os.getppid()
    pipe = os.dup(1)
    os.dup2(2, 1)  # so that output of libraries does not mix with reports
    writing = threading.Lock()

    def report(news: dict[str, Any]) -> None:
        with writing, contextlib.suppress(OSError):  # the trainer may have ended
            os.write(pipe, json.dumps(news).encode() + b"\n")

    writer = Writer(trainer, report)
    threading.Thread(target=writer.watch, daemon=True).start()
    with importing(), contextlib.suppress(Exception):  # reported once there is a run
        importlib.import_module("runner.callbacks._mlflow.sink")
        importlib.import_module("runner.callbacks._mlflow.store").open_early(resolve_uri(None))
    for line in sys.stdin:
        writer.execute(**json.loads(line))
    writer.leave()


class Writer:
    """Delivers the runs of one trainer, each on a thread, and after each of them those that others left unsent."""

    def __init__(self, trainer: int, report: Callable[[dict[str, Any]], None]) -> None:
        self._trainer = trainer
        self._report = report
        self._deliveries: dict[int, Delivery] = {}  # that are not done; of the one run left by others, by -1
        self._threads: list[threading.Thread] = []
        self._addresses: list[str] = []
        self._known: set[Path] = set()  # entries of the register that are not looked at again
        self._leftover = threading.Lock()

    def execute(self, number: int, run_dir: str = "", target: dict[str, Any] | None = None) -> None:
        """Start a delivery, which a command with a target asks for, or finish it."""
        folder = Path(run_dir)
        if target is None:
            if number in self._deliveries:
                self._deliveries[number].finish()
            return
        for earlier in list(self._deliveries.values()):
            if earlier.run_dir == folder:  # an earlier session of the run, whose end is known
                earlier.stopped.wait()

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
        self._known.add(unsent_entry(target, folder))
        self._deliveries[number] = Delivery(folder, target, report, live=True)
        if os.getppid() != self._trainer:
            self._deliveries[number].finish()
        thread = threading.Thread(target=self._deliver, args=(number, unsent_entry(target, folder).parent), daemon=True)
        thread.start()
        self._threads = [thread, *(other for other in self._threads if other.is_alive())]

    def watch(self) -> None:
        """Exit some time after the trainer has ended, even in the middle of a call to a server that does not answer.

        Data workers of the trainer may outlive it, and hold the other end of the standard input.
        """
        while os.getppid() == self._trainer:
            time.sleep(POLL)
        self._finish()
        time.sleep(LINGER + GRACE)
        os._exit(1)  # the next writer continues after what is marked as sent

    def leave(self) -> None:
        """Exit when everything is sent, or the time is up: the trainer has ended, or wants no more of this process."""
        deadline = time.monotonic() + LINGER
        self._finish()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        os._exit(0)  # without waiting for calls that hang

    def _finish(self) -> None:
        for delivery in list(self._deliveries.values()):
            delivery.finish()

    def _deliver(self, number: int, register: Path) -> None:
        self._deliveries[number].run()
        del self._deliveries[number]
        with self._leftover:
            for entry in sorted(set(register.glob("*")) - self._known):
                self._known.add(entry)
                with contextlib.suppress(OSError, ValueError):  # an entry that cannot be read stays
                    self._send_leftover(entry)

    def _send_leftover(self, entry: Path) -> None:
        """Deliver a run of this user that an earlier writer left unsent, unless its trainer is alive."""
        run_dir = Path(entry.read_text())
        if not (run_dir / "mlflow" / SPOOL).exists():  # the run was deleted
            entry.unlink()
            return
        target = read_target(run_dir / "mlflow")
        target = target and with_credentials(target, self._addresses)
        if target and (alive := lock_file(run_dir / "mlflow" / "trainer.lock")):
            alive.close()
            self._deliveries[-1] = Delivery(run_dir, target, lambda _: None, live=False, wanted=False)
            self._deliveries[-1].run()
            del self._deliveries[-1]
