"""The writer process: imports MLflow, takes the names of runs on its standard input, and sends their spools.

`python -m callbacks._mlflow_writer --sync RUN_FOLDER ...` sends what earlier runs left, and ends.
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
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from callbacks._mlflow_delivery import Delivery, Report
from callbacks._mlflow_spool import try_lock
from callbacks._mlflow_target import resolve_uri

POLL = 0.2  # seconds between two looks at the spools
LINGER = 60.0  # seconds to finish in when the trainer has ended
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # The writer itself tries again; a call that waits for minutes would hold up the others.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def serve() -> None:
    """Serve the trainer that started this process, until it ends and everything is sent."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # a scheduler ends all processes of a job: this one must say so in MLflow
    os.nice(15)
    _configure()
    trainer = os.getppid()
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no report
    orders: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()

    def report(news: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the trainer may have ended
            reports.write(json.dumps(news) + "\n")

    Service(report).run(orders, trainer)


def sync(run_dirs: list[str]) -> bool:
    """Send what runs left unsent, and print how it went; whether MLflow has all of it now.

    Args:
        run_dirs: folders of runs.
    """
    _configure()
    complete = True
    for name in run_dirs:
        try:
            delivery = Delivery(Path(name).resolve(), _print_report, live=False)
        except (OSError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            complete = False
            continue
        while not delivery.finished:
            delivery.step()
        print(f"{name}: MLflow has {'all' if delivery.complete else 'not all'} of it")
        complete = complete and delivery.complete
    return complete


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

    def run(self, orders: queue.SimpleQueue[dict[str, str] | None], trainer: int) -> None:
        """Work until the trainer has ended and nothing is left to do, or time is up.

        Args:
            orders: what the trainer wants; None when it has ended.
            trainer: its process id.
        """
        with contextlib.suppress(Exception):  # said when there is a run to say it of
            importlib.import_module("callbacks._mlflow_sink")
            importlib.import_module("callbacks._mlflow_store").open_early(resolve_uri(None))
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

    def _take(self, orders: queue.SimpleQueue[dict[str, str] | None]) -> bool:
        """Take an order, if there is one; False when it is that the trainer has ended."""
        busy = any(delivery.due for delivery in self._active.values()) or (self._backlog and not self._active)
        try:
            order = orders.get(timeout=0.0 if busy else POLL)
        except queue.Empty:
            return True
        if order is None:
            return False
        if "deliver" in order:
            self._deliver(order["deliver"])
        elif order["finish"] in self._active:
            self._active[order["finish"]].finish()
        else:
            self._report({"run": order["finish"], "stopped": True})
        return True

    def _deliver(self, run_dir: str) -> None:
        try:
            with (Path(run_dir) / "mlflow" / "writer.log").open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            delivery = self._active[run_dir] = Delivery(Path(run_dir), self._report, live=True)
        except (OSError, ValueError) as error:
            self._report({"run": run_dir, "error": str(error), "stopped": True})
            return
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
        """Take on a run that an earlier writer could not finish, unless its trainer lives."""
        try:
            run_dir = Path(entry.read_text())
            if not (run_dir / "mlflow" / "run.json").exists():  # the run was deleted
                entry.unlink()
            elif alive := try_lock(run_dir / "mlflow" / "trainer.lock"):
                alive.close()
                self._active[str(run_dir)] = Delivery(run_dir, lambda _: None, live=False)
        except (OSError, ValueError):
            traceback.print_exc()


def _configure() -> None:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def _read_orders(orders: queue.SimpleQueue[dict[str, str] | None]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)


def _print_report(news: dict[str, Any]) -> None:
    for name in ("error", "refused"):
        if name in news:
            print(f"{news['run']}: {news[name]}", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--sync"] or not sys.argv[2:]:
        sys.exit(__doc__)
    sys.exit(0 if sync(sys.argv[2:]) else 1)
