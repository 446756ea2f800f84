"""The trainer's side of a run: it writes logged values to the spool, starts their delivery, and never fails."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.callbacks._mlflow.spool import FILES, IMAGES, Sent, Spool, is_id, now_ms, read_sent, write_sent
from runner.callbacks._mlflow.target import is_copy, make_target, read_identity, unsent_entry, write_target
from runner.callbacks._mlflow.writer_process import WriterProcess, shared_writer
from runner.failures.errors import SessionOver
from runner.failures.exits import is_expected_exit
from runner.files.addresses import hidden_everywhere
from runner.files.whole import write_atomically
from runner.terminal.commands import show_command, typed_command

log = logging.getLogger("runner")

KILLED_TIMEOUT = 2.0  # seconds; a user who interrupts a run wants it to end, and the writer continues for a while
SOON = 1.0
LATER = 5.0
"""Seconds to wait for the writer before printing a message: `SOON` on a terminal, `LATER` elsewhere."""


class Session:
    """A run's spool and its delivery, from `begin` until `wait`. Each kind of failure gives one warning.

    Entries appended before `begin` stay in memory, so that a run that is refused before it begins leaves no files.

    Args:
        run_dir: the run's folder. If it is not writable, nothing is recorded.
        fields: `fields` of `make_target`, which say where the run goes.

    Attributes:
        run_id: MLflow's id of the run, or None until the writer reports it.
        experiment_id: MLflow's id of the experiment, or None until the writer reports it.
    """

    def __init__(self, run_dir: Path, **fields: Any) -> None:
        self._run_dir = run_dir.resolve()
        self._folder = self._run_dir / "mlflow"
        self._fields = {**fields, "start_time": now_ms()}
        self._postponed: list[Callable[[Spool], None]] | None = []  # writes that wait for `begin`
        self._beginning = threading.RLock()  # metrics arrive on another thread
        self._warned: set[str] = set()
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self._target: dict[str, Any] = {}
        self._spool: Spool | None = None
        self._position = 0  # in the spool, of the checkpoint from which the run is resumed
        self._position_of: dict[str, Any] = {}  # identity of that spool
        self._writer: WriterProcess | None = None
        self._number = 0  # of the delivery
        self._offset = 0  # bytes of the spool that MLflow has
        self._complete = False
        self._stopped = threading.Event()  # set when no process sends the spool
        self._stopped.set()
        self._status = ""
        self._size = 0

    def begin(self) -> None:
        """Open the spool, write the entries appended so far, and start its delivery. Later calls do nothing."""
        with self._beginning:
            if self._postponed is None:
                return
            try:
                self._open()
            except OSError as error:
                self._warn("lost", f"this run is not recorded, because {self._folder} cannot be written ({error})")
            postponed = self._postponed
            self._postponed = None
            for write in postponed:
                self._write(write)

    def state_dict(self, batch: int) -> dict[str, Any]:
        """Return the ids of run and spool, the run's folder, and the position in the spool; empty before it begins.

        The spool is synced to disk, so that it reaches as far as the checkpoint even after a power cut.
        """
        spool = self._spool
        position = self._position if spool is None else spool.position(batch)
        with contextlib.suppress(OSError):  # other code reports disk errors
            if spool is not None:
                spool.sync()
        identity = {key: self._target.get(key) for key in ("spool", "start_time")}
        state = {"run_id": self.run_id, "run_dir": str(self._run_dir), "position": position} | identity
        return state if state["spool"] else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved run, even if its folder has lost its ids. Call this before `begin`."""
        position = state.get("position")
        if type(position) is int and position >= 0:
            self._position = position
            self._position_of = {key: state.get(key) for key in ("spool", "start_time")}
        before = state.get("run_dir")
        if before == str(self._run_dir) and is_id(state.get("run_id")) and is_id(state.get("spool")):
            self.run_id = state["run_id"]
            self._target = {"spool": state["spool"]}
        elif isinstance(before, str) and is_copy(self._folder, Path(before) / "mlflow"):
            reason = f"{self._run_dir} is a copy of {before}, so both write to the same MLflow run"
            log.warning("MLflow: %s; if it is to be a run of its own, delete %s first", reason, self._folder)

    def append(self, *entries: dict[str, Any]) -> None:
        """Record entries other than metrics, without credentials.

        Parameters of a resumed run that earlier sessions did not have count as changes.
        """

        def write(spool: Spool) -> None:
            resumed = {"resumed": True} if spool.is_resumed else {}
            spool.append(*(hidden_everywhere(entry | (resumed if "params" in entry else {})) for entry in entries))

        self._write(write)

    def append_metrics(self, records: Iterable[tuple[dict[str, float], int, float]]) -> None:
        """Record metrics: tuples of values by key, the step, and the time in seconds."""
        records = list(records)

        def write(spool: Spool) -> None:
            departed_before = spool.departed_at
            spool.append_metrics(records)
            if spool.departed_at != departed_before:
                log.warning(
                    "MLflow: batch %d had a different loss when it was trained before; from that batch on, the run "
                    "contains the values of both sessions",
                    spool.departed_at,
                )
                spool.append({"tags": {"runner.departed_at": str(spool.departed_at)}})

        self._write(write)

    def append_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None) -> None:
        """Record images (N, H, W, C), uint8, in a file next to the spool."""
        import numpy as np

        entry = {"images": name, "captions": None if captions is None else list(captions), "s": step, "t": now_ms()}

        def write(spool: Spool) -> None:
            file = self._folder / IMAGES / f"{uuid.uuid4().hex}.npy"
            file.parent.mkdir(exist_ok=True)
            np.save(file, np.asarray(images, dtype=np.uint8))
            spool.append(hidden_everywhere(entry | {"file": file.name}))

        self._write(write)

    def append_artifact(self, path: Path, folder: str | None) -> None:
        """Record a file or folder. If it is outside the run's folder, it is copied there for the writer."""
        path = path.resolve()
        if not path.is_relative_to(self._run_dir):
            copy = self._folder / FILES / uuid.uuid4().hex / path.name
            try:
                copy.parent.mkdir(parents=True)
                (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy)
            except (OSError, shutil.Error) as error:
                self._warn("lost", f"{path} is not recorded ({error})")
                return
            path = copy
        self.append({"artifact": str(path.relative_to(self._run_dir)), "folder": folder})

    def end(self, error: BaseException | None) -> None:
        """Record the run's status and the trace of the error that ended it, if any. Call `wait` afterwards."""
        status = "FINISHED"
        if error is None:
            self.begin()
        else:
            status = "KILLED" if is_expected_exit(error) else "FAILED"
            if not isinstance(error, SessionOver):
                self.append({"text": "".join(traceback.format_exception(error)), "file": "error.txt"})
        self.finish(status)

    def finish(self, status: str) -> None:
        """Record the final status if the run began, and let the writer send the rest.

        If the writer was killed, a new one continues its work.
        """
        self.append({"status": status, "t": now_ms()})
        spool = self._spool
        self._spool = None
        if spool is None:
            return
        spool.close()
        self._size = spool.size
        self._status = status
        if self._writer is not None:
            if not self._writer.is_alive:
                self._deliver()
            self._writer.finish(self._number)

    def wait(self, timeout: float) -> None:
        """Wait until the writer has sent everything. Print progress if it takes long, and warn if data is left.

        For a KILLED run, wait at most two seconds, and print nothing.
        """
        if self._status == "KILLED":
            self._stopped.wait(min(timeout, KILLED_TIMEOUT))
        elif self._status and self._writer is not None:
            self._wait_with_progress(timeout)
            if not self._complete:
                self._warn("error", f"{self._share_sent()} had arrived when the run ended")

    def wait_for_id(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the run's id in MLflow, or until the writer has given up."""
        deadline = time.monotonic() + timeout
        while self.run_id is None and time.monotonic() < deadline:
            if self._stopped.wait(0.05):
                break

    def _wait_with_progress(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        terminal = sys.stderr.isatty()
        erase, end = ("\r\x1b[K", "") if terminal else ("", "\n")
        delay, pause = (SOON, 0.5) if terminal else (LATER, 10.0)  # a log file gets fewer lines
        if self._stopped.wait(min(delay, timeout)):
            return
        while (left := deadline - time.monotonic()) > 0:
            line = f"saving to MLflow: {self._share_sent()} has arrived; waiting up to {left:.0f} s"
            print(f"{erase}{line}", end=end, file=sys.stderr, flush=True)
            if self._stopped.wait(min(pause, left)):
                break
        print(end=erase, file=sys.stderr, flush=True)

    def _share_sent(self) -> str:
        return f"{self._offset / max(self._size, 1):.0%} of what was logged"

    def _write(self, write: Callable[[Spool], None]) -> None:
        """Write to the spool, now or when the run begins."""
        with self._beginning:
            if self._postponed is not None:
                self._postponed.append(write)
                return
        if (spool := self._spool) is not None:
            try:
                write(spool)
            except OSError as error:
                self._warn("lost", f"values are lost ({error})")

    def _open(self) -> None:
        """Open the spool, write its target next to it, and add the run to the register of unsent runs."""
        before = read_identity(self._folder)
        is_same = before | self._position_of == before  # otherwise the spool was lost and started anew
        spool = Spool(self._folder, self._position if is_same else 0)
        if not spool.is_exclusive:
            self._warn("shared", f"another process is also logging to {self._folder}; both end up in one run")
        if "spool" not in before and self.run_id is not None:
            before = {**before, **self._target}
            write_sent(self._folder, Sent(self._fields["tracking_uri"], self.run_id))
        target = self._target = make_target(self._fields, before, typed_command())
        write_target(self._folder, target)
        self.run_id = read_sent(self._folder, target["tracking_uri"]).run_id
        self._spool = spool
        identity = {"start": target["start_time"], "spool": target["spool"], "name": target["run_name"]}
        spool.append(hidden_everywhere(identity))
        # Only after writing the line: a sender that has sent all earlier lines removes the entry.
        with contextlib.suppress(OSError):  # without an entry, the run is found in `outputs/`
            write_atomically(unsent_entry(self._run_dir, target["cwd"]), str(self._run_dir))
        self._deliver()

    def _deliver(self) -> None:
        try:
            self._writer = shared_writer()
        except OSError as error:
            self._warn("error", f"the process that sends to it cannot be started ({error})")
        else:
            self._stopped.clear()
            receive = partial(self._receive, self._writer)
            self._number = self._writer.deliver(self._run_dir, self._target, receive)

    def _receive(self, writer: WriterProcess, report: dict[str, Any]) -> None:
        """Process a report of the writer, or of an earlier writer that was killed."""
        self.run_id = report.get("run_id", self.run_id)
        self.experiment_id = report.get("experiment_id", self.experiment_id)
        self._offset = report.get("offset", self._offset)
        self._complete = report.get("complete", self._complete)
        for kind in ("error", "refused", "renamed", "behind"):
            if kind in report:
                self._warn(kind, report[kind])
        if "stopped" in report and writer is self._writer:
            self._stopped.set()

    def _warn(self, kind: str, text: str) -> None:
        """Warn of a failure, once for each kind: data that is not sent, left out, renamed or lost."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        if kind == "error":
            command = show_command("sync", str(self._run_dir))
            text = (
                f"{text.rstrip('. ')}. Training does not wait for it: logged values are kept in {self._folder}, and "
                f"sent when MLflow can be reached again, by the next run, or by `{command}`"
            )
        elif kind in ("refused", "renamed"):
            text = f"{text} (any others are in {self._folder / 'writer.log'})"
        log.warning("MLflow: %s", text)
