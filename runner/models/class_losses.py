"""Losses of classifiers by name, with class weights and label smoothing: the same for every model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.failures.checks import check_number, check_one_of, refuse_if

LOSSES = ("cross_entropy", "focal")


def class_loss(
    num_classes: int,
    loss: str = "cross_entropy",
    gamma: float = 2.0,
    class_weights: Sequence[float] | str | None = None,
    label_smoothing: float = 0.0,
    multi_label: bool = False,
) -> Callable[..., Tensor]:
    """Return a loss function of logits and targets; torch's `cross_entropy` itself if nothing is changed.

    Targets are class numbers `(N, ...)` for logits `(N, C, ...)`; with `multi_label`, truth values `(N, C)`.

    For the arguments see `runner.models.classification.ClassificationModel`.

    Raises:
        ValueError: an argument is out of range, or there is not one weight for each class.
    """
    check_one_of("loss", loss, LOSSES)
    check_number("gamma", gamma, "[0, inf)")
    check_number("label_smoothing", label_smoothing, "[0, 1)")
    weight = None if class_weights is None else check_class_weights(class_weights, num_classes)
    is_focal = loss == "focal"
    if multi_label:
        return MultiLabelLoss(gamma if is_focal else 0.0, weight, label_smoothing)
    if is_focal:
        reason = "loss='focal' does not smooth labels; leave one of them out"
        refuse_if(label_smoothing > 0, "label_smoothing", label_smoothing, reason)
        return FocalLoss(gamma, weight)
    return F.cross_entropy if weight is None and label_smoothing == 0 else CrossEntropy(weight, label_smoothing)


def check_class_weights(class_weights: Any, num_classes: int) -> Tensor:
    """Return the weights of classes as float32 `(C,)`; raise ValueError if there is not one number for each class."""
    allowed = f"must be {num_classes} numbers, one for each class, at least 0 and not all 0"
    known = "; 'balanced' needs data whose training labels can be read" if isinstance(class_weights, str) else ""
    refuse_if(isinstance(class_weights, str), "class_weights", class_weights, allowed + known)
    numbers = [*class_weights]
    fits = all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers) and any(numbers)
    refuse_if(len(numbers) != num_classes or not fits, "class_weights", numbers, allowed)
    return torch.tensor(numbers, dtype=torch.float32)


class CrossEntropy(nn.CrossEntropyLoss):
    """Torch's cross entropy, whose class weights are not part of the weights that a run saves."""

    def __init__(self, weight: Tensor | None, label_smoothing: float) -> None:
        super().__init__(label_smoothing=label_smoothing)
        del self.weight
        self.register_buffer("weight", weight, persistent=False)


class FocalLoss(nn.Module):
    """A mean over targets of -w (1 - p)^gamma log p, with the probability p of the target's class and its weight w.

    Args:
        gamma: how much the loss of well-classified samples is reduced, at least 0.
        weight: weight of each class, `(C,)`; None weighs all classes equally.
    """

    weight: Tensor | None
    ignore_index = -100

    def __init__(self, gamma: float, weight: Tensor | None) -> None:
        super().__init__()
        self.gamma = gamma
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits `(N, C, ...)` for class numbers `(N, ...)` or probabilities `(N, C, ...)`."""
        if not target.is_floating_point():
            return focal_loss(input, target, gamma=self.gamma, weight=self.weight)
        losses = target * _focused(input.log_softmax(dim=1), self.gamma)
        if self.weight is not None:
            losses = losses * self.weight.view(-1, *[1] * (losses.ndim - 2))
        return losses.sum(dim=1).mean()


def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float = 2.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the focal loss of logits `(N, C, ...)` for class numbers `(N, ...)`, with a reduction as in torch."""
    losses = _focused(-F.cross_entropy(input, target, ignore_index=ignore_index, reduction="none"), gamma)
    counts = target != ignore_index
    weights = counts if weight is None else weight[target.where(counts, 0)] * counts
    losses = losses * weights
    return losses if reduction == "none" else losses.sum() / (weights.sum() if reduction == "mean" else 1)


def _focused(log_probability: Tensor, gamma: float) -> Tensor:
    """Return -(1 - p)^gamma log p; 1 - p stays above 0, where a power below 1 has no gradient."""
    rest = (-torch.expm1(log_probability)).clamp(min=torch.finfo(log_probability.dtype).tiny)
    return -(rest**gamma) * log_probability


class MultiLabelLoss(nn.Module):
    """Binary cross entropy of each class, or its focal form, as a mean over classes and samples.

    Args:
        gamma: exponent of the focal loss; 0 is cross entropy.
        weight: factor of the loss where a class is present, `(C,)`; None is 1.
        label_smoothing: s of the targets y (1 - s) + s / 2.
    """

    weight: Tensor | None

    def __init__(self, gamma: float, weight: Tensor | None, label_smoothing: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.label_smoothing = label_smoothing
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits `(N, C)` for truth values or probabilities `(N, C)`."""
        target = target.to(input.dtype) * (1 - self.label_smoothing) + self.label_smoothing / 2
        if self.gamma == 0:
            return F.binary_cross_entropy_with_logits(input, target, pos_weight=self.weight)
        present = target * _focused(F.logsigmoid(input), self.gamma)
        absent = (1 - target) * _focused(F.logsigmoid(-input), self.gamma)
        return (present * (1 if self.weight is None else self.weight) + absent).mean()
