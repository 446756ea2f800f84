"""The writer process: reads commands from its standard input and sends the spools of runs to MLflow.

MLflow is imported only after `serve` has set its environment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from runner.callbacks._mlflow.delivery import Delivery, Report
from runner.callbacks._mlflow.failures import print_trace
from runner.callbacks._mlflow.spool import SPOOL, open_log
from runner.callbacks._mlflow.target import read_target, resolve_uri, set_environment, with_credentials
from runner.distributed.signals import HANDLED
from runner.files.lock import lock_file
from runner.libraries.importing import importing

Commands = queue.SimpleQueue[dict[str, Any] | None]

POLL = 0.2  # seconds between two checks of the spools
LINGER = 6.0  # seconds to finish after the trainer has ended; users may take a longer-lived process for a leftover
GRACE = 1.0  # further seconds before the process exits in the middle of a call


def serve() -> None:
    """Serve the trainer that started this process until it has ended and everything is sent."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a job: this one must outlive the trainer
    os.nice(5)  # a quarter of a core that training wants too: less, and on a busy machine nothing is sent for minutes
    set_environment()
    trainer = os.getppid()
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that output of libraries does not mix with reports
    commands: Commands = queue.SimpleQueue()
    ended = threading.Event()
    threading.Thread(target=_read_commands, args=(commands, ended), daemon=True).start()
    threading.Thread(target=_leave_in_time, args=(trainer, ended), daemon=True).start()

    def report(news: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the trainer may have ended
            reports.write(json.dumps(news) + "\n")

    Service(report).run(commands, trainer)


class Service:
    """The deliveries for one trainer, and for runs that earlier trainers left unsent."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._active: dict[str, Delivery] = {}
        self._backlog: deque[Path] = deque()
        self._known: set[str] = set()
        self._addresses: list[str] = []

    def run(self, commands: Commands, trainer: int) -> None:
        """Work until the trainer has ended and nothing is left to do, or the time is up.

        None among the commands means that the trainer has ended.
        """
        with importing(), contextlib.suppress(Exception):  # reported once there is a run
            importlib.import_module("runner.callbacks._mlflow.sink")
            importlib.import_module("runner.callbacks._mlflow.store").open_early(resolve_uri(None))
        deadline = None
        while deadline is None or (time.monotonic() < deadline and (self._active or self._backlog)):
            gone = not self._take(commands) or os.getppid() != trainer
            if gone and deadline is None:
                deadline = time.monotonic() + LINGER
                for delivery in self._active.values():
                    delivery.finish()
            self._step()
        for delivery in self._active.values():
            delivery.stop()

    def _take(self, commands: Commands) -> bool:
        """Execute the next command, if there is one, and return False if the trainer has ended."""
        busy = any(delivery.due for delivery in self._active.values()) or (self._backlog and not self._active)
        try:
            command = commands.get(timeout=0.0 if busy else POLL)
        except queue.Empty:
            return True
        if command is None:
            return False
        if "deliver" in command:
            self._deliver(command["deliver"], command["target"])
        elif command["finish"] in self._active:
            self._active[command["finish"]].finish()
        else:
            self._report({"run": command["finish"], "stopped": True})
        return True

    def _deliver(self, run_dir: str, target: dict[str, Any]) -> None:
        try:
            with open_log(Path(run_dir)) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            delivery = self._active[run_dir] = Delivery(Path(run_dir), target, self._report, live=True)
        except (OSError, ValueError) as error:
            self._report({"run": run_dir, "error": str(error), "stopped": True})
            return
        self._addresses.append(target["tracking_uri"])
        left = sorted(entry for entry in delivery.unsent.parent.glob("*") if entry.name not in self._known)
        self._known.update(entry.name for entry in (delivery.unsent, *left))
        self._backlog.extend(entry for entry in left if entry != delivery.unsent)

    def _step(self) -> None:
        for delivery in self._active.values():
            delivery.step()
        self._active = {name: delivery for name, delivery in self._active.items() if not delivery.finished}
        if self._backlog and not self._active:
            self._send_leftover(self._backlog.popleft())

    def _send_leftover(self, entry: Path) -> None:
        """Start delivering a run of this user that an earlier writer left unsent, unless its trainer is alive."""
        try:
            run_dir = Path(entry.read_text())
            if not (run_dir / "mlflow" / SPOOL).exists():  # the run was deleted
                entry.unlink()
                return
            target = read_target(run_dir / "mlflow")
            target = target and with_credentials(target, self._addresses)
            if target and (alive := lock_file(run_dir / "mlflow" / "trainer.lock")):
                alive.close()
                self._active[str(run_dir)] = Delivery(run_dir, target, lambda _: None, live=False, wanted=False)
        except (OSError, ValueError):
            print_trace()


def _read_commands(commands: Commands, ended: threading.Event) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put(None)
    ended.set()


def _leave_in_time(trainer: int, ended: threading.Event) -> None:
    """Exit some time after the trainer has ended, even in the middle of a call to a server that does not answer."""
    while os.getppid() == trainer and not ended.wait(POLL):
        pass
    time.sleep(LINGER + GRACE)
    os._exit(1)  # the next writer continues after what is marked as sent
