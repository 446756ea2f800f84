"""The result of training, as returned by `Trainer.fit`."""

from __future__ import annotations

import logging
import math
from functools import cached_property
from pathlib import Path

from runner.core.state import State
from runner.distributed.environment import is_rank_zero
from runner.terminal.console import show_path
from runner.training.metrics import scalars

log = logging.getLogger("runner")


class FitResult:
    """The metrics of a run at the end of `fit`, and the run's folder."""

    run_dir: Path
    """The run's folder; it exists only if something was written to it."""
    best: Path | None
    """The best checkpoint by the `monitor` of a `CheckpointSaver`; None without one, and on ranks other than 0."""

    def __init__(self, state: State, warns: bool = True) -> None:
        self.run_dir = state.run_dir
        checkpoints = (getattr(callback, "best_checkpoint", None) for callback in state.callbacks)
        self.best = next(filter(None, checkpoints), None)
        self._values = {label: dict(values) for label, values in state.metric_values.items()}
        if warns and is_rank_zero():
            loss = float(getattr(state, "total_loss", 0.0))  # The intended sync: training is over.
            if not math.isfinite(loss):
                remedy = "lower the learning rate, or look for nan in the data; NaNMonitor ends such a run at once"
                log.warning("the loss of the last batch is %s: %s", loss, remedy)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric by 'label/name', such as 'eval/loss' or 'train/MulticlassAccuracy'.

        A metric with several elements has an entry for each. The values are read from the device here.
        """
        return {
            key: float(value)
            for label, values in self._values.items()
            for name, metric in values.items()
            for key, value in scalars(f"{label}/{name}", metric).items()
        }

    def __repr__(self) -> str:
        values = ", ".join(f"{key} {value:.4g}" for key, value in self.metrics.items()) or "no metrics"
        return f"FitResult({values}; run {show_path(self.run_dir)})"
