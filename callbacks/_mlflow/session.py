"""The trainer's side of one run: what is logged goes to the spool, the writer process is told, nothing ever raises."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.addresses import hidden_everywhere
from runner.callbacks._mlflow.spool import FILES, IMAGES, Sent, Spool, is_id, now_ms, read_sent, write_sent
from runner.callbacks._mlflow.target import known_before, make_order, write_order
from runner.callbacks._mlflow.writer_process import Progress, WriterProcess, how_to_send, shared_writer
from runner.files.whole import write_whole

if TYPE_CHECKING:
    from runner.destination import SweepSummary

log = logging.getLogger("runner")

KILLED_TIMEOUT = 2.0  # seconds: who interrupts wants the process gone, and the writer goes on without it for a while


class Session:
    """One run's spool and its delivery, from `begin` until `close`; troubles are one warning.

    What is appended before waits in memory: a run that is refused before it begins leaves nothing behind.

    Args:
        run_dir: the run's folder; where it cannot be written, nothing is recorded.
        target: where the run goes: see `make_order`.
    """

    def __init__(self, run_dir: Path, **target: Any) -> None:
        self._run_dir = run_dir.resolve()
        self._target = target
        self._held: list[dict[str, Any]] = []
        self._begun = False
        self._beginning = threading.Lock()
        self._warned = False
        self._known_id: str | None = None
        self._order: dict[str, Any] = {}
        self._spool: Spool | None = None
        self._writer: WriterProcess | None = None
        self._progress: Progress | None = None

    def begin(self) -> None:
        """Open the spool, with what was appended so far, and have it sent from now on. Later calls do nothing."""
        with self._beginning:  # metrics come from a thread of their own
            if self._begun:
                return
            try:
                self._open(self._target)
            except OSError as error:
                self._warn(f"this run is not recorded, because {self._run_dir / 'mlflow'} cannot be written ({error})")
            self._begun = True
            self.append(*self._held)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run, once the writer has said it."""
        return (self._progress and self._progress.run_id) or self._known_id

    @property
    def experiment_id(self) -> str | None:
        """MLflow's id of the experiment, once the writer has said it."""
        return self._progress and self._progress.experiment_id

    def state_dict(self) -> dict[str, Any]:
        """Return the ids of the run and of its spool, and the folder that it is of; nothing before they are known.

        What was logged before is on the disk by then: a power cut takes no more of it than of training.
        """
        with contextlib.suppress(OSError):  # of a disk that is gone other lines tell
            if self._spool is not None:
                self._spool.sync()
        known = {"run_id": self.run_id, "spool": self._order.get("spool"), "run_dir": str(self._run_dir)}
        return known if self.run_id else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that run where its folder no longer knows it; another folder is another run. Before `begin`."""
        if state.get("run_dir") == str(self._run_dir) and is_id(state.get("run_id")) and is_id(state.get("spool")):
            self._known_id, self._order = state["run_id"], {"spool": state["spool"]}

    def append(self, *entries: dict[str, Any]) -> None:
        """Record entries of any kind, without credentials in what they say."""
        entries = tuple(map(hidden_everywhere, entries))
        if not self._begun:
            self._held += entries
        elif self._spool is not None:
            try:
                self._spool.append(*entries)
            except OSError as error:
                self._warn(f"values are lost ({error})")

    def append_metrics(self, records: Iterable[tuple[dict[str, float], int, float]]) -> None:
        """Record metrics, each with its step and its time in seconds; they begin the run."""
        self.begin()
        if self._spool is None:
            return
        begun = self._spool.departed
        try:
            self._spool.append_metrics(records)
        except OSError as error:
            self._warn(f"metrics are lost ({error})")
        if self._spool.departed != begun:
            log.warning(
                "MLflow: batch %d was trained before with another loss; from it on the run holds the values of both",
                self._spool.departed,
            )
            self.append({"tags": {"runner.departed_at": str(self._spool.departed)}})

    def append_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None) -> None:
        """Record images of shape (N, H, W, C), uint8, in a file beside the spool; they begin the run."""
        import numpy as np

        self.begin()
        if self._spool is None:
            return
        file = self._spool.path.parent / IMAGES / f"{uuid.uuid4().hex}.npy"
        try:
            file.parent.mkdir(exist_ok=True)
            np.save(file, np.asarray(images, dtype=np.uint8))
        except OSError as error:
            self._warn(f"images are lost ({error})")
        else:
            texts = None if captions is None else list(captions)
            self.append({"images": name, "file": file.name, "captions": texts, "s": step, "t": now_ms()})

    def append_artifact(self, path: Path, folder: str | None) -> None:
        """Record a file or a folder; one from outside of the run's folder is copied, as no writer looks there."""
        path = path.resolve()
        if not path.is_relative_to(self._run_dir):
            copy = self._run_dir / "mlflow" / FILES / uuid.uuid4().hex / path.name
            try:
                copy.parent.mkdir(parents=True)
                (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy)
            except (OSError, shutil.Error) as error:
                self._warn(f"{path} is not recorded ({error})")
                return
            path = copy
        self.append({"artifact": str(path.relative_to(self._run_dir)), "folder": folder})

    def end(self, error: BaseException | None, timeout: float) -> None:
        """Close the run with the status that what ended it means, None: nothing did, and with its trace."""
        status = "FINISHED"
        if error is None:
            self.begin()
        else:
            status = "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"
            self.append({"text": "".join(traceback.format_exception(error)), "file": "error.txt"})
        self.close(status, timeout)

    def close(self, status: str, timeout: float) -> None:
        """Record how the run ended, if it began, and wait until the writer has sent all of it, with a bound.

        Where the writer was killed, another goes on where it stopped.

        Args:
            status: FINISHED, FAILED or KILLED.
            timeout: seconds; a run that is KILLED does not wait so long.
        """
        self.append({"status": status, "t": now_ms()})
        spool, self._spool = self._spool, None
        if spool is None:
            return
        spool.close()
        if self._writer is None or self._progress is None:
            return
        if not self._writer.alive:
            self._known_id = self.run_id
            self._deliver()
        self._writer.finish(self._progress)
        self._progress.wait(spool.lines, min(timeout, KILLED_TIMEOUT) if status == "KILLED" else timeout)

    def _open(self, target: dict[str, Any]) -> None:
        """Open the spool; say beside it where it goes, and in the store's register that it is not there yet."""
        folder = self._run_dir / "mlflow"
        spool = Spool(folder)
        if not spool.exclusive:
            self._warn(f"another process logs to {folder} at this moment; both end up in one run")
        before = known_before(folder)
        if "spool" not in before and self._known_id is not None:
            before = {**before, **self._order}
            write_sent(folder, Sent(target["tracking_uri"], self._known_id))
        order = self._order = make_order(self._run_dir, before, **target)
        write_order(folder, order)
        unsent = Path(order["unsent"])
        with contextlib.suppress(OSError):  # beside a store that cannot be written, of which the writer will tell
            write_whole(unsent, str(self._run_dir))
        self._known_id = read_sent(folder, order["tracking_uri"]).run_id
        self._spool = spool
        spool.append({"start": now_ms(), "spool": order["spool"]})
        self._deliver()

    def _deliver(self) -> None:
        try:
            self._writer = shared_writer()
        except OSError as error:
            self._warn(f"the process that sends to it cannot be started ({error}): {how_to_send(self._run_dir)}")
        else:
            self._progress = self._writer.deliver(self._run_dir, self._order)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("MLflow: %s", text)


def log_sweep(session: Session, summary: SweepSummary, nested: bool, timeout: float) -> None:
    """Log what came of a sweep, into the same run as when it was given before.

    Args:
        session: in the sweep's folder.
        summary: with status RUNNING before the first job.
        nested: whether jobs are to find the run when they begin; otherwise it is made at the end.
        timeout: seconds to wait for MLflow.
    """
    if summary.status == "RUNNING":
        if nested:
            session.begin()
            _wait_for_id(session, timeout)
        return
    session.begin()
    tags = {"runner.sweep": summary.sweep, "runner.sweep_summary": "true"}
    tags |= {f"best.{key}": value for key, value in summary.best.items()}
    session.append({"tags": tags})
    for name, (columns, rows) in summary.tables.items():
        session.append({"table": name, "columns": list(columns), "rows": [list(row) for row in rows]})
    for path in summary.files:
        session.append_artifact(path, "sweep")
    # A sweep that is given again has finished more jobs than before, or the same.
    session.append_metrics([(dict(summary.metrics), int(summary.metrics["sweep/finished"]), time.time())])
    session.close(summary.status, timeout)


def parent_tags(run_dir: Path, tracking_uri: str) -> dict[str, str]:
    """Return the tags that nest a job's run in the run of its sweep; none where there is no such run.

    Args:
        run_dir: of the job.
        tracking_uri: of the store.
    """
    run_id = read_sent(run_dir.parent / "mlflow", tracking_uri).run_id
    return {} if run_id is None else {"mlflow.parentRunId": run_id}


def _wait_for_id(session: Session, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while session.run_id is None and time.monotonic() < deadline:
        time.sleep(0.05)
