"""Delivers one run's spool to its MLflow store: in order, resumable at any line, each value exactly once.

It imports MLflow only when it opens the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from runner.callbacks._mlflow.description import origin_tags
from runner.callbacks._mlflow.failures import Deleted, explain, print_trace
from runner.callbacks._mlflow.spool import (
    SPOOL,
    Sent,
    Spool,
    is_metrics,
    now_ms,
    read_entries,
    read_sent,
    write_sent,
)
from runner.callbacks._mlflow.target import address_for_mlflow
from runner.files.addresses import without_those_of
from runner.files.lock import lock_file

if TYPE_CHECKING:
    from mlflow.entities import Run

    from runner.callbacks._mlflow.sink import RunSink
    from runner.callbacks._mlflow.system_metrics import LoadMonitor

SEND_INTERVAL = 2.0  # seconds between two sends during training, because MLflow takes CPU time from the trainer
LAST_ATTEMPTS = 3  # attempts before the spool of a finished run is left to the next run
LONGEST_PAUSE = 60.0  # maximum seconds between two attempts during training
LOCK_PATIENCE = 60.0  # seconds that a finished run waits for the writer of an earlier session, which is still sending
FILES = {"artifact", "text", "table", "images", "model"}  # entries that go to the artifact store, a separate store

Report = Callable[[dict[str, Any]], None]


class Delivery:
    """Sends the entries of a spool step by step, and finally the status of the run.

    Args:
        run_dir: the run's folder.
        target: target of the spool, with credentials in the address; see `make_target`.
        report: called with news for the trainer.
        live: whether the trainer is the parent of this process; otherwise an earlier trainer left the spool.
        wanted: whether to restore the run in MLflow if it was deleted there; otherwise it is left alone.

    Attributes:
        finished: whether nothing is left to do, because everything is sent or it was given up.
        complete: whether the store has the whole run.
        unsent: the entry in the store's register for runs that are not sent completely.
    """

    def __init__(
        self, run_dir: Path, target: Mapping[str, Any], report: Report, live: bool, wanted: bool = True
    ) -> None:
        self.finished = False
        self.complete = False
        self._run_dir = run_dir
        self._folder = run_dir / "mlflow"
        self._spool = self._folder / SPOOL
        self._target = target
        self._report: Report = lambda news: report({"run": str(run_dir), **news})
        self.unsent = Path(self._target["unsent"])
        self._live = live
        self._wanted = wanted
        self._attempts = LAST_ATTEMPTS if live else 1
        self._failures = 0
        self._next_step = 0.0
        self._next_files = 0.0
        self._waits_until = 0.0
        self._lock: IO[str] | None = None
        self._sent: Sent | None = None
        self._sink: RunSink | None = None
        self._monitor: LoadMonitor | None = None

    def finish(self) -> None:
        """Send the rest and stop, because the trainer will add nothing more or has ended."""
        if self._live:
            self._live = False
            self._next_step = 0.0
            self._waits_until = time.monotonic() + LOCK_PATIENCE

    @property
    def due(self) -> bool:
        """Whether it is time for the next step."""
        return time.monotonic() >= self._next_step

    def step(self) -> None:
        """Send some of the spool, unless it is too early. Errors are reported, not raised."""
        if not self.due:
            return
        try:
            more = self._send()
            self._failures = 0
            self._next_step = time.monotonic() + (0.0 if more else SEND_INTERVAL)
        except Exception as error:
            print_trace(self._target["tracking_uri"])
            self._failures += 1
            self._next_step = time.monotonic() + min(2.0**self._failures / 4, LONGEST_PAUSE)
            self._report({"error": explain(error, self._target["tracking_uri"])})
            if not self._live and self._failures >= self._attempts:
                self.stop()

    def stop(self) -> None:
        """Stop, leaving unsent entries to another writer."""
        self._stop_watching()
        if self._lock is not None:
            self._lock.close()
        self.finished = True
        self._report({"stopped": True, "complete": self.complete})

    def _send(self) -> bool:
        """Send a chunk, and return whether there may be more."""
        self._lock = self._lock or lock_file(self._folder / "writer.lock")
        if self._lock is None:
            if self._live or time.monotonic() < self._waits_until:
                return False  # wait: another writer is still sending what an earlier session of this run left
            raise BlockingIOError(f"another process is sending {self._spool}")
        sink, sent = self._open()
        entries = list(read_entries(self._spool, sent.offset))
        for together, group in groupby(entries, key=lambda pair: is_metrics(pair[0])):
            chunk = list(group)
            if together:
                sink.send_metrics([entry for entry, _ in chunk if entry is not None])
                self._mark(sent, len(chunk), chunk[-1][1], ended=False)
                continue
            for entry, end in chunk:
                if entry is not None and not FILES.isdisjoint(entry):
                    self._send_files(sink, sent, entry)
                else:
                    self._send_entry(sink, entry)
                self._mark(sent, 1, end, ended=entry is not None and "status" in entry)
        self._send_load(sink)
        if self._live or not entries:
            self._send_postponed(sink, sent)
        if entries or self._live:
            return bool(entries)
        if not sent.ended:
            return self._mark_failed()
        self.unsent.unlink(missing_ok=True)
        self.complete = True
        self.stop()
        return False

    def _open(self) -> tuple[RunSink, Sent]:
        """Return the run in MLflow and how much of the spool it holds, opening it on the first call."""
        from runner.callbacks._mlflow.sink import RunSink
        from runner.callbacks._mlflow.store import open_run

        if self._sink is None or self._sent is None:
            target = self._target
            sent = read_sent(self._folder, target["tracking_uri"])
            client, run = open_run(
                target,
                sent.run_id,
                lambda: origin_tags(target["command"], target["cwd"], self._folder.parent),
                self._wanted,
            )
            if sent.run_id != run.info.run_id:  # newly created, or created again after it was removed
                sent = Sent(target["tracking_uri"], run.info.run_id)
                write_sent(self._folder, sent)
            renamed = partial(self._report_text, "renamed")
            self._sent = sent
            self._sink = RunSink(client, run, self._refuse, renamed, self._run_dir)
            self._report({"run_id": run.info.run_id, "experiment_id": run.info.experiment_id, "lines": sent.lines})
        return self._sink, self._sent

    def _send_entry(self, sink: RunSink, entry: dict[str, Any] | None) -> None:
        if entry is None:
            self._refuse(f"a line of {self._spool} that was truncated is skipped")
            return
        if "status" in entry:
            self._stop_watching()
            self._send_load(sink)
        sink.send(entry)
        if "start" in entry and self._live:
            self._watch(sink.run)

    def _send_files(self, sink: RunSink, sent: Sent, entry: dict[str, Any]) -> None:
        """Send an entry with files, or postpone it if they cannot be stored, so that later entries are not held up."""
        if not sent.postponed:
            try:
                self._send_entry(sink, entry)
                return
            except Deleted:
                raise
            except Exception as error:
                print_trace(self._target["tracking_uri"])
                self._report({"error": f"files: {explain(error, self._target['tracking_uri'])}"})
                self._next_files = time.monotonic() + LONGEST_PAUSE
        sent.postponed.append(sent.offset)  # kept in order, because a later table replaces an earlier one

    def _send_postponed(self, sink: RunSink, sent: Sent) -> None:
        """Try to send postponed files, from time to time during training."""
        if self._live and time.monotonic() < self._next_files:
            return
        self._next_files = time.monotonic() + LONGEST_PAUSE
        while sent.postponed:
            entry, _ = next(read_entries(self._spool, sent.postponed[0]))
            self._send_entry(sink, entry)
            del sent.postponed[0]
            write_sent(self._folder, sent)

    def _mark(self, sent: Sent, lines: int, offset: int, ended: bool) -> None:
        sent.lines += lines
        sent.offset = offset
        sent.ended = ended
        write_sent(self._folder, sent)
        self._failures = 0  # pauses grow only while nothing is accepted
        self._report({"lines": sent.lines})

    def _mark_failed(self) -> bool:
        """Record the status of a trainer that ended without recording it, and return whether that was done."""
        spool = Spool(self._folder)
        is_gone = spool.exclusive
        if is_gone:
            spool.append({"status": "FAILED", "t": now_ms()})
        else:  # the run was resumed: the new trainer's writer continues
            self.stop()
        spool.close()
        return is_gone

    def _watch(self, run: Run) -> None:
        """Start sampling system metrics, until the run ends."""
        interval = self._target["system_metrics_interval"]
        if self._monitor is not None or not interval:
            return
        try:
            from runner.callbacks._mlflow.system_metrics import LoadMonitor

            self._monitor = LoadMonitor(run, interval, address_for_mlflow(self._target["tracking_uri"]))
            self._monitor.start()
        except Exception as error:  # an unexpected driver must not hold up the metrics
            self._refuse(f"no system metrics: {error}")

    def _stop_watching(self) -> None:
        if self._monitor is not None:
            self._monitor.finish()

    def _send_load(self, sink: RunSink) -> None:
        if self._monitor is not None:
            taken = self._monitor.samples[:]
            sink.send_metrics(taken)
            del self._monitor.samples[: len(taken)]

    def _refuse(self, text: str) -> None:
        self._report_text("refused", text)

    def _report_text(self, kind: str, text: str) -> None:
        text = without_those_of(self._target["tracking_uri"], text)
        print(text, file=sys.stderr, flush=True)
        self._report({kind: text})
