"""A metric for classifiers: accuracy, computed in few operations. This module imports torchmetrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runner.libraries.torchmetrics import import_metric

if TYPE_CHECKING:
    from torchmetrics import Metric
else:
    Metric = import_metric()


class Top1Accuracy(Metric):
    """The fraction of samples whose largest logit is that of the target class.

    It is bit-identical to torchmetrics' `MulticlassAccuracy(average='micro')`, but takes 5 device operations per batch
    instead of 14, because it does not count the wrong predictions. It is 0 before the first sample.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False

    right: Tensor
    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("right", "samples"):
            self.add_state(name, default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch, without a host-device sync.

        Args:
            outputs: logits `(N, C, ...)`, or class numbers `(N, ...)`.
            targets: class numbers `(N, ...)`.
        """
        predicted = outputs.argmax(dim=1) if outputs.ndim == targets.ndim + 1 else outputs
        self.right += (predicted.flatten() == targets.flatten()).sum()
        self.samples += targets.numel()

    def compute(self) -> Tensor:
        """Return the fraction over all updates and ranks, as a 0-dim float tensor."""
        return self.right.float() / self.samples.clamp(min=1).float()
