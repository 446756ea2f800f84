"""Uploads checkpoints on a background thread, without delaying training."""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runner.checkpoints.mirror import OWNER, Mirror, stage
from runner.files.addresses import without_credentials, without_credentials_of
from runner.files.whole import read_object, write_atomically

if TYPE_CHECKING:
    from runner import State

log = logging.getLogger("runner")

STAGE = ".mirror"  # folder in the run's folder with copies that are still to upload
QUIET = 2.0  # seconds to wait at the end of a run before printing a message


class Upload(NamedTuple):
    """A checkpoint to upload."""

    name: str
    number: int
    """Its position among the uploads of the session, from 0."""
    staged: Path
    """The folder to upload, which no longer changes."""
    checkpoint: str
    """The checkpoint's path in `staged`."""
    best: Sequence[str]
    """Names of the run's best checkpoints when this one was added."""


class MirrorUploads:
    """Uploads a run's checkpoints, the newest first. A checkpoint that is no longer kept is not uploaded.

    Errors become warnings. A failed upload is tried again with the next checkpoint, and once more at the end of the
    run. The mirror keeps the newest `keep` checkpoints and the best ones; `keep=-1` keeps all. With `overwrite`, the
    folder on the mirror may belong to another run.
    """

    def __init__(self, mirror: str, state: State, keep: int, overwrite: bool) -> None:
        name = re.sub(r"[^\w.+=-]+", "-", state.run_name).strip("-.") or "run"
        self.address = f"{mirror.rstrip('/')}/{name}"
        self.newest: Upload | None = None
        """The newest checkpoint on the mirror."""
        self._run_dir = state.run_dir
        self._keep = keep
        self._overwrite = overwrite
        self._mirror: Mirror | None = None
        self._owner = ""
        self._last: Upload | None = None  # the newest upload that was added
        self._numbers = itertools.count()
        self._waiting: dict[str, Upload] = {}
        self._failed: dict[str, Upload] = {}
        self._is_busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._warned: set[str] = set()

    def add(self, name: str, folder: str, kept: Collection[str], best: Sequence[str]) -> None:
        """Queue a checkpoint that was just written. Rank 0.

        `kept` names all checkpoints that the run keeps, and `best` its best ones, best first.
        """
        if self._thread is None:
            shutil.rmtree(self._run_dir / STAGE, ignore_errors=True)  # left by a session that was killed
            # A daemon, because an upload that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
            self._thread.start()
        number = next(self._numbers)
        upload = Upload(name, number, self._run_dir / STAGE / f"{number}", f"{folder}/{name}", best)
        try:
            self._owner = self._owner or _identify(self._run_dir)
            stage(self._run_dir, upload.checkpoint, upload.staged)
        except OSError as error:
            self._warn(name, error)
            return
        with self._changed:
            pending = {**self._failed, **self._waiting}
            still_kept = {key: queued for key, queued in pending.items() if key in kept and key != name}
            self._waiting = still_kept | {name: upload}
            self._failed = {}
            self._last = upload
            dropped = [queued for key, queued in pending.items() if self._waiting.get(key) is not queued]
            self._changed.notify_all()
        for queued in dropped:
            shutil.rmtree(queued.staged, ignore_errors=True)

    def finish(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for all uploads, and warn if the mirror lacks the newest checkpoint. Rank 0."""
        if self._thread is None:
            return
        with self._changed:
            self._waiting = {**self._failed, **self._waiting}
            self._failed = {}
            self._changed.notify_all()
            if not self._changed.wait_for(self._is_idle, min(QUIET, timeout)):
                shown = without_credentials(self.address)
                print(f"uploading to {shown}: waiting up to {timeout:g} s", file=sys.stderr, flush=True)
                self._changed.wait_for(self._is_idle, max(0.0, timeout - QUIET))
            self._is_over = True
            self._changed.notify_all()
        shutil.rmtree(self._run_dir / STAGE, ignore_errors=True)
        if self._last is not None and self.newest is not self._last:
            state = f"its newest is {self.newest.name}" if self.newest else "it has no checkpoint of this run"
            text = "mirror %s does not have the last checkpoint, %s: %s; copy %s there, or use it from here"
            log.warning(text, without_credentials(self.address), self._last.name, state, self._run_dir)

    def _is_idle(self) -> bool:
        return not self._waiting and not self._is_busy

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if self._is_over:
                    return
                _, upload = self._waiting.popitem()
                self._is_busy = True
            try:
                self._upload(upload)
            except Exception as error:  # each file system raises its own errors
                self._warn(upload.name, error)
                with self._changed:
                    self._failed[upload.name] = upload
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _upload(self, upload: Upload) -> None:
        if self._mirror is None:
            mirror = Mirror(self.address)
            mirror.claim(self._owner, self._overwrite)
            self._mirror = mirror
        self._mirror.upload(upload.staged, upload.name, upload.checkpoint, upload.best)
        if self.newest is None or self.newest.number < upload.number:
            self.newest = upload
        self._mirror.prune(self._keep, self.newest.best)
        shutil.rmtree(upload.staged, ignore_errors=True)

    def _warn(self, name: str, error: Exception) -> None:
        """Warn of a failed upload, once for each kind of error."""
        kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if not self._is_over and kind not in self._warned:
            self._warned.add(kind)
            reason = " ".join(without_credentials_of(self.address, f"{type(error).__name__}: {error}").split())[:500]
            text = "mirror %s: checkpoint %s was not uploaded; training continues without it (%s)"
            log.warning(text, without_credentials(self.address), name, reason)


def _identify(run_dir: Path) -> str:
    """Return a run's id for its mirrors, which is created once and kept in the run's folder and on each mirror."""
    run_id = read_object(run_dir / OWNER).get("run")
    if not isinstance(run_id, str) or re.fullmatch("[0-9a-f]{32}", run_id) is None:
        run_id = secrets.token_hex(16)
        write_atomically(run_dir / OWNER, json.dumps({"run": run_id}))
    return run_id
