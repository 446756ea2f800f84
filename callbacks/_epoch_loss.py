"""The training loss as users see it: the mean over the batches of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner import MetricRecord

TRAIN_LOSS = "loss/train/total"
"""The key under which the loss of each batch is logged."""


class EpochLoss:
    """The mean training loss of the current epoch so far; between epochs, of the last one."""

    def __init__(self) -> None:
        self._count = 0
        self._total = 0.0

    @property
    def mean(self) -> float | None:
        """The mean over the batches so far; None before the first."""
        return self._total / self._count if self._count else None

    def add(self, record: MetricRecord) -> None:
        """Add the loss of a batch, if the record has one."""
        loss = record.metrics.get(TRAIN_LOSS)
        if loss is None:
            return
        if record.timestamp.batch_in_epoch == 1:
            self._count = 0
            self._total = 0.0
        self._count += 1
        self._total += loss

    def state_dict(self) -> list[float]:
        """Return the count and the total, for a checkpoint."""
        return [self._count, self._total]

    def load_state_dict(self, state: list[float]) -> None:
        """Restore the count and the total from a checkpoint."""
        count, total = state
        self._count = int(count)
        self._total = total
