"""A classifier made of a plain ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from runner.model import Model

if TYPE_CHECKING:
    from torchmetrics import Metric


class ClassificationModel(Model):
    """A classifier made of a plain module: cross entropy as its loss, top-1 accuracy as its metric.

    Batches are ``(inputs, targets)``; the targets are class numbers ``(N,)`` int64 or probabilities ``(N, C)``.

    Args:
        module: maps inputs ``(N, ...)`` to logits ``(N, C)``.
        num_classes: C, at least 2.
        loss_fn: ``loss_fn(logits, targets)`` -> 0-dim tensor, a mean over samples; None is torch's ``cross_entropy``.

    Raises:
        ValueError: num_classes is below 2.
    """

    def __init__(
        self, module: nn.Module, num_classes: int, loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes={num_classes!r}: a classifier needs at least 2 classes")
        self.module = module
        self.num_classes = num_classes
        self.loss_fn = F.cross_entropy if loss_fn is None else loss_fn

    def forward(self, batch: Any) -> Tensor:
        """Return the logits ``(N, C)``."""
        return self.module(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return ``loss_fn(outputs, targets)``."""
        return self.loss_fn(outputs, batch[1])

    def metrics(self, train: bool) -> dict[str, Metric]:
        """Return ``MulticlassAccuracy``: the share of samples whose largest logit is their class."""
        from runner.libraries.torchmetrics import import_torchmetrics

        accuracy = import_torchmetrics().classification.MulticlassAccuracy
        # Validating the arguments would read the targets back from the device at every batch.
        return {"MulticlassAccuracy": accuracy(self.num_classes, average="micro", validate_args=False)}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        """Add a batch to one metric; targets that are probabilities count as their most probable class."""
        targets = self._targets(batch)
        metric.update(outputs, targets.argmax(dim=1) if targets.is_floating_point() else targets)

    def predictions(self, batch: Any, outputs: Tensor) -> dict[str, Any]:
        """Return ``target``, the most probable class as ``prediction`` ``(N,)``, and ``probabilities`` ``(N, C)``."""
        found = {"prediction": outputs.argmax(dim=1), "probabilities": outputs.float().softmax(dim=1)}
        return super().predictions(batch, found)
