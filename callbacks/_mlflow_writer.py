"""The writer process: imports MLflow, takes the names of runs on its standard input, and sends their spools.

`python -m callbacks._mlflow_writer --sync RUN_FOLDER ...` sends what earlier runs left, and ends.
"""

from __future__ import annotations

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

from callbacks._mlflow_delivery import Delivery, Report

POLL = 0.2  # seconds between two looks at the spools
LINGER = 60.0  # seconds to finish in when the trainer has ended
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # The writer itself tries again; a call that waits for minutes would hold up the others.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def serve() -> None:
    """Serve the trainer that started this process, until it ends and everything is sent."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # a scheduler ends all processes of a job: this one must say so in MLflow
    os.nice(5)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    trainer = os.getppid()
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no report
    orders: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()

    def report(news: dict[str, Any]) -> None:
        try:
            reports.write(json.dumps(news) + "\n")
        except OSError:
            pass  # the trainer has ended

    Service(report).run(orders, trainer)


def sync(run_dirs: list[str]) -> bool:
    """Send what runs left unsent, and print how far it came; whether MLflow has all of it now."""
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
        try:
            import callbacks._mlflow_sink
            import callbacks._mlflow_store  # noqa: F401 - slow, so before the first run is known
        except ImportError:
            pass  # said when a run is known
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            if deadline is None and not self._take(orders) | (os.getppid() != trainer):
                pass
            elif deadline is None:
                deadline = time.monotonic() + LINGER
        raise NotImplementedError


def _read_orders(orders: queue.SimpleQueue[dict[str, str] | None]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)


def _print_report(news: dict[str, Any]) -> None:
    for name in ("error", "refused", "lines"):
        if name in news:
            print(f"{news['run']}: {news[name]}{' lines sent' if name == 'lines' else ''}")
