"""A language model made of a plain `nn.Module`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from runner.models.model import Model

if TYPE_CHECKING:
    from torchmetrics import Metric

IGNORED_TARGET = -100  # the target that torch's cross entropy ignores by default


class LanguageModel(Model):
    """A language model made of a plain module: the mean cross entropy of the next token.

    Batches are `(inputs, targets)`, both `(N, T)` int64; targets of -100 are left out. If several documents share a
    row, a third tensor has the position `(N, T)` of each token in its document. Algorithms may replace the targets by
    probabilities `(N, T, V)`.

    Args:
        module: maps inputs `(N, T)`, and positions if batches have them, to logits `(N, T, V)`. If it has a method
            `flops_per_token(context)`, the model reports its floating-point operations.
        metric_name: name of the evaluation metric, such as `'BitsPerByte'` when the tokens are bytes.

    Attributes:
        loss_fn: torch's `cross_entropy`, which `LabelSmoothing` replaces with one that smooths.
    """

    def __init__(self, module: nn.Module, metric_name: str = "BitsPerToken") -> None:
        super().__init__()
        self.module = module
        self.metric_name = metric_name
        self.loss_fn = F.cross_entropy

    def forward(self, batch: Any) -> Tensor:
        """Return the logits `(N, T, V)`."""
        return self.module(batch[0], *batch[2:])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the cross entropy in nats, averaged over the valid targets; 0 when none is valid."""
        logits = outputs.reshape(-1, outputs.shape[-1])
        if batch[1].is_floating_point():
            return self.loss_fn(logits, batch[1].reshape(logits.shape))
        targets = batch[1].reshape(-1)
        total = self.loss_fn(logits, targets, ignore_index=IGNORED_TARGET, reduction="sum")
        # The built-in mean is NaN when no target is valid, and one such microbatch would spoil the whole batch.
        return total / self.loss_weight(batch).clamp(min=1)

    def metrics(self, train: bool) -> Mapping[str, Metric]:
        """Return the bits per target token as `metric_name` for an evaluation, and no metrics for training."""
        if train:
            return {}  # the training loss is the same quantity in nats
        from runner.models.bits_per_token import BitsPerToken

        return {self.metric_name: BitsPerToken(ignore_index=IGNORED_TARGET)}

    def predictions(self, batch: Any, outputs: Tensor) -> dict[str, Any]:
        """Return `target`, the most probable token as `prediction`, and `loss` in nats, each `(N, T)`."""
        loss = F.cross_entropy(outputs.mT.float(), batch[1], ignore_index=IGNORED_TARGET, reduction="none")
        return super().predictions(batch, {"prediction": outputs.argmax(dim=-1), "loss": loss})

    def num_tokens(self, batch: Any) -> int:
        """Return the number of input tokens, N times T."""
        return batch[0].numel()

    def loss_weight(self, batch: Any) -> Tensor:
        """Return the number of valid targets, as a 0-dim int64 tensor on the batch's device."""
        return (batch[1] != IGNORED_TARGET).sum()

    vars(loss_weight)["counts_targets"] = True  # see `runner.distributed.shares.weigh_alike`

    def flops_per_batch(self, batch: Any) -> float | None:
        """Return the floating-point operations of the forward and backward pass, or None if unknown."""
        flops_per_token = getattr(self.module, "flops_per_token", None)
        return None if flops_per_token is None else flops_per_token(batch[0].shape[1]) * batch[0].numel()
