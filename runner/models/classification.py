"""A classifier made of a plain `nn.Module`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from runner.failures.checks import check_whole, refuse_if
from runner.models.class_losses import class_loss
from runner.models.entries import Entries
from runner.models.supervised import SupervisedModel

if TYPE_CHECKING:
    from torchmetrics import Metric


class ClassificationModel(SupervisedModel):
    """A `SupervisedModel` for classes: cross entropy as its loss, accuracy as its metric.

    The targets are class numbers `(N,)` int64 or probabilities `(N, C)`; with `multi_label`, truth values `(N, C)`.

    Args:
        module: maps inputs `(N, ...)` to logits `(N, C)`.
        num_classes: C, at least 2, or 1 with `multi_label`.
        loss_fn: `loss_fn(logits, targets)` as in `SupervisedModel`. None is the loss that the arguments below describe.
            It needs a class for every sample, unless classes have weights; give `nn.CrossEntropyLoss()` if some samples
            have the target -100, which means no class.
        metrics: torchmetrics by name; None is the accuracy, `MulticlassAccuracy` or `MultilabelAccuracy`.
        inputs: entries of the batch for `module`; see `SupervisedModel`.
        targets: the entry of the batch with the targets.
        class_weights: weight of each class in the loss. The mean over targets is sum_i w[y_i] l_i / sum_i w[y_i], as
            torch's; with `multi_label`, w multiplies the loss where the class is present, as torch's `pos_weight`. In a
            config also 'balanced': n / (C n_c) for the n_c of n training samples that have class c.
        label_smoothing: share of the probability that is spread evenly over the classes, in [0, 1); with `multi_label`,
            over the two answers for each class. The loss of evaluations is smoothed too, unlike with the algorithm
            `LabelSmoothing`.
        loss: 'cross_entropy', or 'focal' as in Lin et al. 2017, arXiv:1708.02002.
        gamma: exponent of the focal loss, at least 0; 0 is cross entropy.
        multi_label: whether a sample may have any number of classes.
        classes: names of the classes, in order; None: a config takes them from the data, if it has names.

    Attributes:
        class_names: the names of the classes, in order; None if they are unknown.

    Raises:
        ValueError: `num_classes` is too small, another argument is out of range or does not fit it, or `inputs` or
            `targets` names no entry.
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
        class_weights: Sequence[float] | str | None = None,
        label_smoothing: float = 0.0,
        loss: str = "cross_entropy",
        gamma: float = 2.0,
        multi_label: bool = False,
        classes: Sequence[str] | None = None,
    ) -> None:
        check_whole("num_classes", num_classes, 1 if multi_label else 2)
        described = class_loss(num_classes, loss, gamma, class_weights, label_smoothing, multi_label)
        reason = "replaces the loss, so class_weights, label_smoothing and loss do nothing; leave one of them out"
        refuse_if(loss_fn is not None and described is not F.cross_entropy, "loss_fn", loss_fn, reason)
        super().__init__(module, described if loss_fn is None else loss_fn, metrics, inputs, targets)
        if self.loss_fn is F.cross_entropy or multi_label:
            self._mean = None
            self._averages = "samples"  # every sample counts, so ranks need not exchange numbers of targets
        self.num_classes = num_classes
        self.multi_label = multi_label
        self.class_names: list[str] | None = None if classes is None else check_names(classes, num_classes)
        self._has_own_metrics = metrics is not None

    def name_classes(self, names: Sequence[str]) -> None:
        """Set the names of the classes, in order, for predictions, pictures and exports."""
        self.class_names = [*names]

    def metrics(self, train: bool) -> Mapping[str, Metric]:
        """Return the user's metrics, or the accuracy: the fraction of samples, or of truth values, that are right."""
        if self._has_own_metrics:
            return super().metrics(train)
        if self.multi_label:
            from runner.libraries.torchmetrics import import_torchmetrics

            classification = import_torchmetrics().classification
            return {"MultilabelAccuracy": classification.MultilabelAccuracy(self.num_classes, validate_args=False)}
        from runner.models.top1_accuracy import Top1Accuracy

        return {"MulticlassAccuracy": Top1Accuracy()}

    def predictions(self, batch: Any, outputs: Tensor) -> dict[str, Any]:
        """Return `target`, the most probable class as `prediction` `(N,)`, and `probabilities` `(N, C)`.

        With `multi_label`, the prediction holds a truth value for each class, `(N, C)`.
        """
        return super().predictions(batch, self._columns(outputs))

    def _columns(self, outputs: Tensor) -> dict[str, Tensor]:
        logits = outputs.float()
        if self.multi_label:
            return {"prediction": logits > 0, "probabilities": logits.sigmoid()}
        return {"prediction": outputs.argmax(dim=1), "probabilities": logits.softmax(dim=1)}

    def _metric_targets(self, batch: Any, outputs: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the class numbers; targets that are probabilities or one-hot become their most probable class."""
        positional, named = super()._metric_targets(batch, outputs)
        if self.multi_label:
            return [target.long() for target in positional], named
        shape = outputs.shape if isinstance(outputs, Tensor) else None
        has_columns = [target.is_floating_point() or target.shape == shape for target in positional]
        return [
            target.argmax(dim=1) if columns else target for target, columns in zip(positional, has_columns, strict=True)
        ], named


def check_names(classes: Sequence[str], num_classes: int) -> list[str]:
    """Return the names of classes as a list.

    Raises:
        ValueError: the names are not distinct strings, one for each class.
    """
    names = [] if isinstance(classes, str) else [*classes]
    fits = len(names) == len({*names}) == num_classes and all(isinstance(name, str) for name in names)
    refuse_if(not fits, "classes", classes, f"must be {num_classes} different names, one for each class")
    return names
