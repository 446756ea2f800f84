"""Reports progress as lines of JSON, for other programs to read."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from runner import Callback
from runner.files.values import LocalPath
from runner.terminal.answer import SCHEMA, plain

if TYPE_CHECKING:
    from runner import Logger, State

MAX_SILENCE = 30.0  # seconds


class ProgressLines(Callback):
    """Writes a JSON line when training begins and ends, after each epoch and evaluation, and at least every 30 seconds.

    A line is `{"schema", "event", "epoch", "batch", "sample", "loss", "metrics", "time", "run"}`: `event` is
    fit_start, epoch_end, eval_end, alive or fit_end, `loss` is the training loss of the last batch, `metrics` are the
    latest of each evaluator, and `time` is in seconds since 1970. Only rank 0 writes. It cannot write during a batch,
    so the time between two lines may exceed 30 seconds if batches are slow.

    Args:
        path: file to append lines to; None means stderr.
    """

    def __init__(self, path: LocalPath | None = None) -> None:
        self.path = path
        self._written_at = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        self._write("fit_start", state)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._write_if_silent(state)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self._write_if_silent(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._write("epoch_end", state)

    def eval_end(self, state: State, logger: Logger) -> None:
        self._write("eval_end", state)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._write("fit_end", state)

    def _write_if_silent(self, state: State) -> None:
        if time.monotonic() - self._written_at >= MAX_SILENCE:
            self._write("alive", state)

    def _write(self, event: str, state: State) -> None:
        from runner.distributed.ranks import get_global_rank
        from runner.training.metrics import scalars

        self._written_at = time.monotonic()
        if get_global_rank() != 0:
            return
        now = state.timestamp
        loss = getattr(state, "total_loss", None)
        metrics = {
            key: float(number)  # waits for the device, once per line
            for label, values in state.metric_values.items()
            for name, value in values.items()
            for key, number in scalars(f"{label}/{name}", value).items()
        }
        entry = {
            "schema": SCHEMA,
            "event": event,
            "epoch": now.epoch,
            "batch": now.batch,
            "sample": now.sample,
            "loss": None if loss is None else float(loss),  # this also waits for the device
            "metrics": metrics,
            "time": time.time(),
            "run": str(state.run_dir),
        }
        line = json.dumps(plain(entry), allow_nan=False)
        if self.path is None:
            print(line, file=sys.stderr, flush=True)
        else:
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
