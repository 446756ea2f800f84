"""A metric for language models: the mean cross entropy in bits. It imports torchmetrics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.libraries.torchmetrics import import_metric

if TYPE_CHECKING:
    from torchmetrics import Metric
else:
    Metric = import_metric()


class BitsPerToken(Metric):
    """The cross entropy of the targets under the model, in bits per target token; lower is better.

    Torch's cross entropy is `-ln p(target)`, in nats. As `log2 p = ln p / ln 2`, dividing by `ln 2` gives bits: the
    code length of the target under the model (Shannon 1948, "A Mathematical Theory of Communication"). The metric sums
    bits and valid targets over all updates and ranks, and divides only then, so the split into batches does not matter.

    For a vocabulary of the 256 bytes, this is the number of bits per byte. It is NaN before the first valid target.

    Args:
        ignore_index: targets with this value do not count.
    """

    full_state_update = False
    higher_is_better = False
    is_differentiable = False

    bits: Tensor
    tokens: Tensor

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.add_state("bits", default=torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("tokens", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add one batch, without a sync with the device.

        Args:
            logits: scores before the softmax, `(..., V)` for a vocabulary of V tokens.
            targets: token numbers in [0, V) or `ignore_index`, `(...)`.
        """
        logits = logits.reshape(-1, logits.shape[-1]).float()
        nats = F.cross_entropy(logits, targets.reshape(-1), ignore_index=self.ignore_index, reduction="sum")
        self.bits += nats / math.log(2)
        self.tokens += (targets != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Return the bits per target token over all updates and ranks, as a 0-dim float tensor."""
        return self.bits / self.tokens
