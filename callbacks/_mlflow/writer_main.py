"""The writer process: imports MLflow, takes the names of runs on its standard input, and sends their spools."""

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

from runner.callbacks._mlflow.delivery import Delivery, Report, print_trace
from runner.callbacks._mlflow.spool import SPOOL, open_log, try_lock
from runner.callbacks._mlflow.target import read_order, resolve_uri, set_environment, with_credentials

Orders = queue.SimpleQueue[dict[str, Any] | None]

POLL = 0.2  # seconds between two looks at the spools
LINGER = 6.0  # seconds to finish in when the trainer has ended; a process that stays longer looks like one forgotten
GRACE = 1.0  # seconds after these until a call that does not return is left where it is


def serve() -> None:
    """Serve the trainer that started this process, until it ends and everything is sent."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # a scheduler ends all processes of a job: this one must say so in MLflow
    os.nice(15)
    set_environment()
    trainer = os.getppid()
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no report
    orders: Orders = queue.SimpleQueue()
    ended = threading.Event()
    threading.Thread(target=_read_orders, args=(orders, ended), daemon=True).start()
    threading.Thread(target=_leave_in_time, args=(trainer, ended), daemon=True).start()

    def report(news: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the trainer may have ended
            reports.write(json.dumps(news) + "\n")

    Service(report).run(orders, trainer)


class Service:
    """The deliveries of one trainer, and of runs that earlier ones left unsent.

    Args:
        report: takes what the trainer is to know.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._active: dict[str, Delivery] = {}
        self._backlog: deque[Path] = deque()
        self._known: set[str] = set()
        self._addresses: list[str] = []

    def run(self, orders: Orders, trainer: int) -> None:
        """Work until the trainer has ended and nothing is left to do, or time is up.

        Args:
            orders: what the trainer wants; None when it has ended.
            trainer: its process id.
        """
        with contextlib.suppress(Exception):  # said when there is a run to say it of
            importlib.import_module("runner.callbacks._mlflow.sink")
            importlib.import_module("runner.callbacks._mlflow.store").open_early(resolve_uri(None))
        deadline = None
        while deadline is None or (time.monotonic() < deadline and (self._active or self._backlog)):
            gone = not self._take(orders) or os.getppid() != trainer
            if gone and deadline is None:
                deadline = time.monotonic() + LINGER
                for delivery in self._active.values():
                    delivery.finish()
            self._step()
        for delivery in self._active.values():
            delivery.stop()

    def _take(self, orders: Orders) -> bool:
        """Take an order, if there is one; False when it is that the trainer has ended."""
        busy = any(delivery.due for delivery in self._active.values()) or (self._backlog and not self._active)
        try:
            order = orders.get(timeout=0.0 if busy else POLL)
        except queue.Empty:
            return True
        if order is None:
            return False
        if "deliver" in order:
            self._deliver(order["deliver"], order["order"])
        elif order["finish"] in self._active:
            self._active[order["finish"]].finish()
        else:
            self._report({"run": order["finish"], "stopped": True})
        return True

    def _deliver(self, run_dir: str, order: dict[str, Any]) -> None:
        try:
            with open_log(Path(run_dir)) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            delivery = self._active[run_dir] = Delivery(Path(run_dir), order, self._report, live=True)
        except (OSError, ValueError) as error:
            self._report({"run": run_dir, "error": str(error), "stopped": True})
            return
        self._addresses.append(order["tracking_uri"])
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
        """Take on a run of this user's that an earlier writer could not finish, unless its trainer lives."""
        try:
            run_dir = Path(entry.read_text())
            if not (run_dir / "mlflow" / SPOOL).exists():  # the run was deleted
                entry.unlink()
                return
            order = read_order(run_dir / "mlflow")
            order = order and with_credentials(order, self._addresses)
            if order and (alive := try_lock(run_dir / "mlflow" / "trainer.lock")):
                alive.close()
                self._active[str(run_dir)] = Delivery(run_dir, order, lambda _: None, live=False, wanted=False)
        except (OSError, ValueError):
            print_trace()


def _read_orders(orders: Orders, ended: threading.Event) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)
    ended.set()


def _leave_in_time(trainer: int, ended: threading.Event) -> None:
    """End this process when its trainer has ended, also out of a call to a server that does not answer."""
    while os.getppid() == trainer and not ended.wait(POLL):
        pass
    time.sleep(LINGER + GRACE)
    os._exit(1)  # what is sent is marked as sent: the next writer goes on from there
