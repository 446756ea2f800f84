"""A classifier made of a plain `nn.Module`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from runner.failures.checks import check_whole
from runner.models.entries import Entries
from runner.models.supervised import SupervisedModel

if TYPE_CHECKING:
    from torchmetrics import Metric


class ClassificationModel(SupervisedModel):
    """A `SupervisedModel` for one class per sample: cross entropy as its loss, top-1 accuracy as its metric.

    The targets are class numbers `(N,)` int64 or probabilities `(N, C)`.

    Args:
        module: maps inputs `(N, ...)` to logits `(N, C)`.
        num_classes: C, at least 2.
        loss_fn: `loss_fn(logits, targets)` as in `SupervisedModel`. None is torch's `cross_entropy` and needs a class
            for every sample; give `nn.CrossEntropyLoss()` if some samples have the target -100, which means no class.
        metrics: torchmetrics by name; None is the accuracy, under the name `MulticlassAccuracy`.
        inputs: entries of the batch for `module`; see `SupervisedModel`.
        targets: the entry of the batch with the targets.

    Raises:
        ValueError: `num_classes` is below 2, or `inputs` or `targets` names no entry.
        TypeError: `module`, `loss_fn` or an entry of `metrics` is of the wrong kind.
    """

    def __init__(
        self,
        module: nn.Module,
        num_classes: int,
        loss_fn: Callable[..., Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        inputs: Entries = 0,
        targets: int | str = 1,
    ) -> None:
        super().__init__(module, F.cross_entropy if loss_fn is None else loss_fn, metrics, inputs, targets)
        check_whole("num_classes", num_classes, 2)
        if loss_fn is None:
            self._mean = None
            self._averages = "samples"  # every sample counts, so ranks need not exchange numbers of targets
        self.num_classes = num_classes
        self._has_own_metrics = metrics is not None

    def metrics(self, train: bool) -> Mapping[str, Metric]:
        """Return the user's metrics, or `MulticlassAccuracy`: the fraction of samples whose largest logit is right."""
        if self._has_own_metrics:
            return super().metrics(train)
        from runner.models.top1_accuracy import Top1Accuracy

        return {"MulticlassAccuracy": Top1Accuracy()}

    def predictions(self, batch: Any, outputs: Tensor) -> dict[str, Any]:
        """Return `target`, the most probable class as `prediction` `(N,)`, and `probabilities` `(N, C)`."""
        columns = {"prediction": outputs.argmax(dim=1), "probabilities": outputs.float().softmax(dim=1)}
        return super().predictions(batch, columns)

    def _metric_targets(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the class numbers; targets that are probabilities become their most probable class."""
        positional, named = super()._metric_targets(batch)
        return [target.argmax(dim=1) if target.is_floating_point() else target for target in positional], named
