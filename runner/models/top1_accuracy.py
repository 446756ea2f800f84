"""A metric for classifiers: the fraction of right answers, in few operations. It imports torchmetrics."""

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
    """The fraction of samples whose largest logit belongs to their target.

    It is bit-identical to torchmetrics' `MulticlassAccuracy(average='micro')`, which also counts the wrong answers:
    that takes 14 operations on the device for each batch, and this takes 5. It is 0 before the first sample.
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
        """Add one batch, without a sync with the device.

        Args:
            outputs: logits `(N, C, ...)`, or class numbers `(N, ...)`.
            targets: class numbers `(N, ...)`.
        """
        answers = outputs.argmax(dim=1) if outputs.ndim == targets.ndim + 1 else outputs
        self.right += (answers.flatten() == targets.flatten()).sum()
        self.samples += targets.numel()

    def compute(self) -> Tensor:
        """Return the fraction over all updates and ranks, as a 0-dim float tensor."""
        return self.right.float() / self.samples.clamp(min=1).float()
