"""What training came to, as `Trainer.fit` returns it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.metrics import scalars
from runner.state import State
from runner.terminal import show_path


@dataclass(frozen=True)
class FitResult:
    """The metrics of a run after `fit`, and where the run is kept.

    Attributes:
        metrics: the last value of each metric by 'label/name', such as 'eval/loss' or 'train/MulticlassAccuracy'; one
            entry for each element of a metric with several.
        run_dir: the run's folder; it exists if something was written to it.
        best: the checkpoint that a `CheckpointSaver` with `monitor` found best; None without one.
    """

    metrics: dict[str, float]
    run_dir: Path
    best: Path | None = None

    @classmethod
    def of(cls, state: State) -> FitResult:
        """Return the result of a run in its present state, which reads metrics back from the device."""
        metrics = {
            key: float(value)
            for label, values in state.metric_values.items()
            for name, one in values.items()
            for key, value in scalars(f"{label}/{name}", one).items()
        }
        best = (getattr(one, "best_checkpoint", None) for one in state.callbacks)
        return cls(metrics, state.run_dir, next((path for path in best if isinstance(path, Path)), None))

    def __str__(self) -> str:
        values = ", ".join(f"{key} {value:.4g}" for key, value in self.metrics.items()) or "no metrics"
        return f"{values} (run {show_path(self.run_dir)})"
