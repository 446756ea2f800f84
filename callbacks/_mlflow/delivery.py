"""Delivers a run's spool to its MLflow store: in order, resumable at any line, and each value exactly once.

MLflow is imported only when the run is opened.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from runner.callbacks._mlflow.spool import (
    METRICS_PER_CALL,
    SPOOL,
    Line,
    Sent,
    Spool,
    is_metrics,
    now_ms,
    read_entries,
    read_sent,
    write_sent,
)
from runner.callbacks._mlflow.target import address_for_mlflow, unsent_entry
from runner.callbacks._mlflow.thinning import SendingRate, Thinning
from runner.failures.errors import Deleted
from runner.files.addresses import without_credentials_of
from runner.files.lock import lock_file
from runner.libraries.mlflow_failures import explain

if TYPE_CHECKING:
    from mlflow.entities import Run

    from runner.callbacks._mlflow.sink import RunSink

SEND_INTERVAL = 2.0  # seconds between two sends during training, because MLflow competes with the trainer for the CPU
LAST_ATTEMPTS = 3  # failed attempts after which the spool of a finished run is left to the next run
LONGEST_PAUSE = 60.0  # maximum seconds between two attempts during training
LOCK_PATIENCE = 60.0  # seconds to wait for the writer of an earlier session that is still sending
LAST = {"status", "model"}  # before these entries, the last value of each key is sent even if it was thinned out
FILES = {"artifact", "text", "table", "images", "model"}  # entries that go to the artifact store
MAX_SAMPLES = 20_000  # of system metrics, about a day; if the server is down for longer, further samples are dropped
PREFIX = "system/"

Report = Callable[[dict[str, Any]], None]


class Delivery:
    """Sends the entries of a spool, and finally the status of the run.

    Args:
        run_dir: the run's folder.
        target: where to send the spool, with credentials in the address; see `make_target`.
        report: called with news for the trainer.
        live: whether a trainer adds to the spool until `finish` is called.
        restore: whether to restore the run in MLflow if it was deleted there; otherwise sending fails.

    Attributes:
        is_complete: whether the store has the whole run.
        stopped: set when sending has ended, because everything is sent or the rest is left to another sender.
    """

    def __init__(
        self, run_dir: Path, target: Mapping[str, Any], report: Report, live: bool, restore: bool = True
    ) -> None:
        self.is_complete = False
        self.run_dir = run_dir
        self.stopped = threading.Event()
        self._folder = run_dir / "mlflow"
        self._spool = self._folder / SPOOL
        self._target = target
        self._report = report
        self._restore = restore
        self._attempts = LAST_ATTEMPTS if live else 1
        self._patience = LOCK_PATIENCE if live else 0.0
        self._finishing = threading.Event()
        self._abandoned = threading.Event()
        if not live:
            self._finishing.set()
        self._is_done = False
        self._failures = 0
        self._next_files = 0.0
        self._lock: IO[str] | None = None
        self._sent = Sent("")
        self._known_end = 0  # offset up to which the store is known to have all metrics, if `sent.json` was lost
        self._rate = SendingRate()
        self._sink: RunSink | None = None
        self._sampler: LoadSampler | None = None

    def finish(self) -> None:
        """Send the rest without pauses, because the trainer adds nothing more or has ended."""
        self._finishing.set()

    def abandon(self) -> None:
        """Stop after the current send, and leave the rest to another delivery of the run."""
        self._abandoned.set()
        self._finishing.set()

    def run(self) -> bool:
        """Send until the store has the whole run or sending has to stop, and return whether it has the whole run."""
        try:
            self._send_all()
        finally:
            self._stop_sampling()
            if self._lock is not None:
                self._lock.close()
            self.stopped.set()
            self._report({"stopped": True, "complete": self.is_complete})
        return self.is_complete

    def _send_all(self) -> None:
        while not self._is_done and not self._abandoned.is_set():
            live = not self._finishing.is_set()  # checked before reading: if not live, the spool is complete
            try:
                pause = 0.0 if self._send(live) else SEND_INTERVAL
                self._failures = 0
            except Exception as error:
                self._print_trace()
                self._report({"error": explain(error, self._target["tracking_uri"])})
                self._rate = SendingRate()
                self._failures += 1
                self._is_done = not live and self._failures >= self._attempts
                pause = min(2.0**self._failures / 4, LONGEST_PAUSE)
            if live:
                self._finishing.wait(pause)
            elif not self._is_done:
                time.sleep(pause)

    def _send(self, live: bool) -> bool:
        """Send a chunk, and return whether there may be more."""
        self._lock = self._lock or lock_file(self._folder / "writer.lock", 0.0 if live else self._patience)
        if self._lock is None and live:
            return False  # the writer of an earlier session is still sending
        if self._lock is None:
            raise BlockingIOError(f"another process is sending {self._spool}")
        sink = self._sink = self._sink or self._open()
        lines = list(read_entries(self._spool, self._sent.offset))
        self._send_lines(sink, lines)
        if not lines:
            self._rate = SendingRate(unsent=0)
        self._send_samples(sink)
        if live or not lines:
            self._send_postponed(sink, live)
        if lines or live:
            return bool(lines)
        if not self._sent.ended:
            return self._record_failure()
        unsent_entry(self.run_dir, self._target["cwd"]).unlink(missing_ok=True)
        self.is_complete = self._is_done = True
        return False

    def _open(self) -> RunSink:
        """Open or create the run in MLflow, and find out how much of the spool it has."""
        from runner.callbacks._mlflow.sink import RunSink
        from runner.callbacks._mlflow.store import open_run

        address = self._target["tracking_uri"]
        sent = read_sent(self._folder, address)
        client, run = open_run(self._target, sent.run_id, self.run_dir, self._restore)
        if sent.run_id != run.info.run_id:  # the run was just created, perhaps because it had been removed
            sent = Sent(address, run.info.run_id)
            write_sent(self._folder, sent)
        self._sent = sent
        self._known_end = self._find_known_end(run) if sent.offset == 0 else 0
        self._report({"run_id": run.info.run_id, "experiment_id": run.info.experiment_id, "offset": sent.offset})
        return RunSink(client, run, self.run_dir, self._tell)

    def _find_known_end(self, run: Run) -> int:
        """Return the offset up to which the store has all metrics, if `sent.json` was lost.

        Metrics are sent in order. If the store has a value of a line, it has all metrics of the lines before. Sending a
        value again takes several times as long as sending a new one. Values that an earlier session left out because
        of `max_values_per_second` stay left out.
        """
        latest = {metric.key: (metric.value, metric.step, metric.timestamp) for metric in run.data._metric_objs}
        known_end = begin = 0
        for entry, end in read_entries(self._spool, limit=None) if latest else ():
            if is_metrics(entry):
                for key, value in entry["m"].items():
                    if latest.get(key) == (value, entry["s"], entry["t"]):
                        del latest[key]  # the store may lack an equal value of a later line
                        known_end = begin
            begin = end
        return known_end

    def _send_lines(self, sink: RunSink, lines: Sequence[Line]) -> None:
        """Send lines in order, metrics in as few calls as MLflow allows, and record after each call what was sent."""
        thinning = Thinning(self._target.get("max_values_per_second"), self._sent)
        metrics: list[dict[str, Any]] = []
        values = 0
        for (entry, end), (following, _) in pairwise([*lines, (None, 0)]):
            if is_metrics(entry):
                chosen = thinning.choose(entry)
                if end > self._known_end:
                    metrics.append(chosen)
                    values += len(chosen["m"])
                if is_metrics(following) and values + thinning.count(following) <= METRICS_PER_CALL:
                    continue
                sink.send_metrics(metrics)
            else:
                if entry is not None and not LAST.isdisjoint(entry):
                    sink.send_metrics(thinning.take_left_out())
                self._send_entry(sink, entry)
            self._watch_rate(values, end)
            self._record_sent(end, entry is not None and "status" in entry, thinning)
            metrics = []
            values = 0

    def _watch_rate(self, values: int, end: int) -> None:
        """Report to the trainer if values are logged faster than they are sent."""
        if self._finishing.is_set():
            return
        rate = self._rate.note(values, end - self._sent.offset, self._spool.stat().st_size - end)
        if rate is not None:
            text = (
                f"values are logged faster than the store accepts them ({rate:,.0f} a second). Training does not "
                "wait: the rest is kept in the run's folder and sent after training. To send fewer values, log "
                f"less often, or add callbacks.mlflow_logger.max_values_per_second={max(rate / 2, 1):.0f}"
            )
            self._report({"behind": text})

    def _send_entry(self, sink: RunSink, entry: dict[str, Any] | None) -> None:
        """Send an entry that is not a metric.

        If its files cannot be stored, it is postponed, so that it does not hold up later entries.
        """
        if entry is None:
            self._tell("refused", f"a line of {self._spool} that was truncated is skipped")
        elif FILES.isdisjoint(entry):
            if "status" in entry:
                self._stop_sampling()
                self._send_samples(sink)
            sink.send(entry)
            if "start" in entry and not self._finishing.is_set():
                self._start_sampling(sink.run)
        else:
            if not self._sent.postponed:
                try:
                    sink.send(entry)
                    return
                except Deleted:
                    raise
                except Exception as error:
                    self._print_trace()
                    self._report({"error": f"files: {explain(error, self._target['tracking_uri'])}"})
                    self._next_files = time.monotonic() + LONGEST_PAUSE
            self._sent.postponed.append(self._sent.offset)  # in order, because a later table replaces an earlier one

    def _send_postponed(self, sink: RunSink, live: bool) -> None:
        """Try to send postponed files; during training, only from time to time."""
        if live and time.monotonic() < self._next_files:
            return
        self._next_files = time.monotonic() + LONGEST_PAUSE
        while self._sent.postponed:
            entry, _ = next(read_entries(self._spool, self._sent.postponed[0]))
            sink.send(entry or {})
            del self._sent.postponed[0]
            write_sent(self._folder, self._sent)

    def _record_sent(self, offset: int, ended: bool, thinning: Thinning) -> None:
        sent = self._sent
        sent.offset = offset
        sent.ended = ended
        sent.sent_at = dict(thinning.sent_at)
        sent.left_out = dict(thinning.left_out)
        write_sent(self._folder, sent)
        self._failures = 0  # pauses grow only while every attempt fails
        self._report({"offset": offset})

    def _record_failure(self) -> bool:
        """Record as failed a run whose trainer ended without a status. Return False if a new trainer runs."""
        spool = Spool(self._folder)
        if spool.is_exclusive:
            spool.append({"status": "FAILED", "t": now_ms()})
        else:  # the run was resumed, and the new trainer's writer continues
            self._is_done = True
        spool.close()
        return not self._is_done

    def _start_sampling(self, run: Run) -> None:
        interval = self._target["system_metrics_interval"]
        if self._sampler is None and interval:
            try:
                sampler = LoadSampler(run, interval, address_for_mlflow(self._target["tracking_uri"]))
                sampler.start()
                self._sampler = sampler
            except Exception as error:  # a faulty driver must not hold up the metrics
                self._tell("refused", f"no system metrics: {error}")

    def _stop_sampling(self) -> None:
        if self._sampler is not None:
            self._sampler.finish()

    def _send_samples(self, sink: RunSink) -> None:
        if self._sampler is not None:
            samples = self._sampler.samples[:]
            sink.send_metrics(samples)
            del self._sampler.samples[: len(samples)]

    def _tell(self, kind: str, text: str) -> None:
        text = self._print(text)
        self._report({kind: text})

    def _print_trace(self) -> None:
        self._print(traceback.format_exc())

    def _print(self, text: str) -> str:
        """Print a text without credentials, and return it."""
        text = without_credentials_of(self._target["tracking_uri"], text)
        with suppress(OSError, ValueError):  # the disk of the run and its log may be full
            print(text, file=sys.stderr, flush=True)
        return text


class LoadSampler(threading.Thread):
    """Samples the load of CPU, memory, disk, network and GPUs with MLflow's monitors, without calling the server.

    MLflow's own thread gives up after the first failed call, and waits for the server when it finishes. Samples are
    `interval` seconds apart. Their steps continue after the last sample of the run.
    """

    def __init__(self, run: Run, interval: float, tracking_uri: str) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        super().__init__(name="load", daemon=True)
        self._monitor = SystemMetricsMonitor(run.info.run_id, interval, tracking_uri=tracking_uri)  # type: ignore[arg-type]
        steps = [metric.step for metric in run.data._metric_objs if metric.key.startswith(PREFIX)]
        self._step = max(steps, default=-1) + 1
        self._finishing = threading.Event()
        self.samples: list[dict[str, Any]] = []
        """Samples as spool entries. The sender removes them."""

    def run(self) -> None:
        """Take samples until `finish` is called."""
        while True:
            for _ in range(self._monitor.samples_before_logging):
                self._monitor.collect_metrics()
                if self._finishing.wait(self._monitor.sampling_interval):
                    return
            values = {f"{PREFIX}{key}": value for key, value in self._monitor.aggregate_metrics().items()}
            if len(self.samples) < MAX_SAMPLES:
                self.samples.append({"m": values, "s": self._step, "t": now_ms()})
            self._step += 1
            for monitor in self._monitor.monitors:
                monitor.clear_metrics()

    def finish(self) -> None:
        """Stop sampling, and keep the unsent samples."""
        self._finishing.set()
        self.join(1.0)
