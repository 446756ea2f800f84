"""Calls wandb on a separate thread, so that training neither waits for wandb nor fails because of it."""

from __future__ import annotations

import logging
import queue
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("runner")

INTERRUPTED_TIMEOUT = 2.0  # seconds; a user who interrupts a run wants the process to end


class WandbSession:
    """A queue of a run's wandb tasks, executed in order once `begin` is called. The first failure gives a warning.

    Args:
        mode: 'offline' or 'online'.
        timeout: seconds to wait at the end for data that is not yet written or sent.
    """

    def __init__(self, mode: str, timeout: float) -> None:
        self._mode = mode
        self._timeout = timeout
        self._folder = Path()
        self._tasks: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed = False

    def begin(self, **run: Any) -> None:
        """Create the run and start executing tasks. Later calls do nothing."""
        if self._thread is None:
            self._folder = Path(run["dir"], "wandb")
            self._thread = threading.Thread(target=self._work, args=(run,), name="wandb", daemon=True)
            self._thread.start()

    def submit(self, task: str, *arguments: Any) -> None:
        """Queue a task, which is a method of `_Run` and its arguments, and return at once."""
        if not self._failed:
            self._tasks.put((task, *arguments))

    def close(self, exit_code: int, in_a_hurry: bool) -> None:
        """End the run, if it began, and wait for that: up to the timeout, or at most two seconds if in a hurry."""
        self.submit("finish", exit_code)
        if self._thread is None:
            return
        timeout = min(self._timeout, INTERRUPTED_TIMEOUT) if in_a_hurry else self._timeout
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._fail(f"is not done after {timeout:g} s")

    def _work(self, run: dict[str, Any]) -> None:
        try:
            wandb_run = _Run(self._mode, self._timeout, run)
            task = ""
            while task != "finish":
                task, *arguments = self._tasks.get()
                getattr(wandb_run, task)(*arguments)
        except Exception as error:
            self._fail(f"failed ({str(error).strip().partition(chr(10))[0] or type(error).__name__})")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("wandb %s: training is not affected; the files written so far are in %s", reason, self._folder)


class _Run:
    """A wandb run, used only on the thread that created it.

    At its end, it may take up to `timeout` seconds to write and send the remaining data.
    """

    def __init__(self, mode: str, timeout: float, run: dict[str, Any]) -> None:
        import wandb

        self._wandb: Any = wandb
        if mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("there is no API key: run `wandb login`, or log with mode=offline")
        Path(run["dir"]).mkdir(parents=True, exist_ok=True)  # otherwise wandb warns, and writes elsewhere
        # wandb replaces these to learn the exit code, which we pass to it anyway.
        hooks = sys.exit, sys.excepthook
        try:
            settings = wandb.Settings(silent=True, console="off", finish_timeout=timeout)
            self._run = self._wandb.init(**run, mode=mode, resume="allow", reinit="create_new", settings=settings)
        finally:
            sys.exit, sys.excepthook = hooks
        self._run.define_metric("batch")
        self._run.define_metric("*", step_metric="batch")

    def set_config(self, values: Mapping[str, Any]) -> None:
        """Add values to the run's config."""
        self._run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the values of a batch. Batches may come in any order."""
        self._run.log({**values, "batch": step})

    def log_table(self, columns: list[str], rows: list[list[Any]], name: str, step: int) -> None:
        """Log a table of plain values."""
        self.log({name: self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)}, step)

    def log_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None) -> None:
        """Log images of shape (N, H, W, C), uint8."""
        texts = captions or [None] * len(images)
        logged = [self._wandb.Image(image, caption=text) for image, text in zip(images, texts, strict=True)]
        self.log({name: logged}, step)

    def save(self, path: Path, folder: str | None) -> None:
        """Copy a file to the run's files."""
        copy = Path(self._run.dir, folder or "", path.name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        self._run.save(str(copy), base_path=self._run.dir, policy="now")

    def finish(self, exit_code: int) -> None:
        """End the run."""
        self._run.finish(exit_code=exit_code)
