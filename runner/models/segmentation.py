"""A model for semantic segmentation: a class for each pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from runner.failures.checks import check_whole
from runner.models.class_losses import CrossEntropy, check_class_weights
from runner.models.classification import ClassificationModel
from runner.models.entries import Entries, pick

if TYPE_CHECKING:
    from torchmetrics import Metric


class SegmentationModel(ClassificationModel):
    """A `ClassificationModel` for the class of each pixel, with cross entropy, mean IoU and pixel accuracy.

    The loss is the mean over all pixels of the global batch that are not ignored, for any number of microbatches and
    ranks. The targets are class numbers `(N, H, W)`, int64.

    Args:
        module: maps images `(N, 3, H, W)` to logits `(N, C, h, w)`, alone or as the entry `out` or `logits` of a
            mapping, as torchvision's and transformers' models return them. Logits of another size are resized
            bilinearly to the size of the images.
        ignore_index: the target of pixels that count neither in the loss nor in the metrics.
        metrics: torchmetrics by name; None means `MeanIoU`, the mean over classes of the intersection over union, and
            `PixelAccuracy`.
        inputs: entries of the batch for `module`; see `SupervisedModel`. The images come first.
        targets: the entry of the batch with the targets.
        num_classes, class_weights, classes: see `ClassificationModel`.

    Raises:
        ValueError: an argument is out of range, or the number of names or weights is not `num_classes`.
    """

    def __init__(
        self,
        module: nn.Module,
        num_classes: int,
        ignore_index: int = 255,
        class_weights: Sequence[float] | None = None,
        metrics: Mapping[str, Any] | None = None,
        inputs: Entries = 0,
        targets: int | str = 1,
        classes: Sequence[str] | None = None,
    ) -> None:
        check_whole("ignore_index", ignore_index, -100)
        weight = None if class_weights is None else check_class_weights(class_weights, num_classes)
        loss_fn = CrossEntropy(weight, label_smoothing=0.0)
        loss_fn.ignore_index = ignore_index
        super().__init__(module, num_classes, loss_fn, metrics, inputs, targets, classes=classes)
        self.ignore_index = ignore_index

    def forward(self, batch: Any) -> Tensor:
        """Return the logits `(N, C, H, W)` of the images of a batch."""
        outputs = super().forward(batch)
        if not isinstance(outputs, Tensor):
            outputs = outputs["out"] if "out" in outputs else outputs["logits"]
        positional, named = pick(batch, self.inputs, "inputs")
        size = [*positional, *named.values()][0].shape[-2:]
        if outputs.shape[-2:] == size:
            return outputs
        return interpolate(outputs, size=size, mode="bilinear", align_corners=False)

    def metrics(self, train: bool) -> Mapping[str, Metric]:
        """Return the user's metrics, or the mean IoU and the pixel accuracy."""
        if self._has_own_metrics:
            return super().metrics(train)
        from runner.libraries.torchmetrics import import_torchmetrics

        classification = import_torchmetrics().classification
        options = {"ignore_index": self.ignore_index, "validate_args": False}
        return {
            "MeanIoU": classification.MulticlassJaccardIndex(self.num_classes, **options),
            "PixelAccuracy": classification.MulticlassAccuracy(self.num_classes, average="micro", **options),
        }

    def _columns(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the most probable class of each pixel, `(N, H, W)`."""
        dtype = torch.uint8 if self.num_classes <= 256 else torch.int64
        return {"prediction": outputs.argmax(dim=1).to(dtype)}
