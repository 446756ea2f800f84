"""Label smoothing: a small part of each target's probability is spread over all classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, LanguageModel, Logger, Model, State
from runner.algorithms._batch import Key, class_probabilities, get_item, with_item
from runner.failures.checks import check_number, refuse_if
from runner.models.supervised import SupervisedModel
from runner.models.target_mean import TargetMean, read_loss, smoothing_of


def smooth_labels(targets: Tensor, logits: Tensor, smoothing: float = 0.1) -> Tensor:
    """Return y (1 - s) + s / K for targets y over K classes: probabilities (N, K, ...), at least float32.

    The loss of logits is lowest when their softmax equals the target. For a one-hot target, the gap between the logit
    of the class and the others would have to be infinite; with smoothing, it is log((1 - s + s / K) / (s / K)), see
    Szegedy et al. 2016.

    Args:
        targets: class indices (N, ...), of which -100 is ignored, or one-hot vectors or probabilities (N, K, ...).
        logits: logits (N, K, ...); only their shape and dtype are used.
        smoothing: share s of the probability to spread, in [0, 1].

    Raises:
        ValueError: the shapes of targets and logits do not match.
    """
    probabilities = class_probabilities(targets, logits)
    # Each row keeps its sum, so an ignored target, a row of zeros, stays a row of zeros.
    return probabilities * (1 - smoothing) + probabilities.sum(dim=1, keepdim=True) * (smoothing / logits.shape[1])


class LabelSmoothing(Algorithm):
    """Trains on smoothed targets; metrics, and everything else after the loss, see the true targets.

    The model's outputs must be logits, and its loss must accept probabilities in their shape, as torch's cross entropy
    and the losses of the models in this project do. If the loss is torch's cross entropy of class indices, torch
    smooths it, in fewer operations and with other rounding. With `MixUp`, targets are mixed first and smoothed second;
    because both are linear, the order does not matter.

    Args:
        smoothing: share of the probability that is spread evenly over all classes, in [0, 1].
        target_key: index or name of the targets in a batch.
        class_dim: dimension of the logits that holds the classes; None: the last one, V of (N, T, V), with a
            `LanguageModel`, otherwise 1, K of (N, K, ...).

    Raises:
        ValueError: `smoothing` is out of range, or the model is multi-label or its loss smooths too; or, during
            training, the shapes of targets and outputs do not match.
        TypeError: during training, the outputs are not a tensor.

    Evidence:
        Strong for classification with enough epochs (Szegedy et al. 2016, arXiv:1512.00567; Müller et al. 2019,
        arXiv:1906.02629); it can hurt distillation from the trained model.
    """

    runs_after = ("MixUp", "CutMix")

    def __init__(self, smoothing: float = 0.1, target_key: Key = 1, class_dim: int | None = None) -> None:
        check_number("smoothing", smoothing, "[0, 1]")
        self.smoothing = smoothing
        self.target_key = target_key
        self.class_dim = class_dim
        self._original: Any = None
        self._loss_fn: Any = None

    def init(self, state: State, logger: Logger) -> None:
        model = state.unwrapped_model
        reason = "the model's loss smooths labels too (label_smoothing); leave one of the two out"
        refuse_if(smoothing_of(getattr(model, "loss_fn", None)) > 0, "smoothing", self.smoothing, reason)
        reason = "a sample of this model may have several classes; give model.label_smoothing instead of the algorithm"
        refuse_if(getattr(model, "multi_label", False), "smoothing", self.smoothing, reason)
        self._loss_fn = find_cross_entropy(model, self.target_key, self.class_dim)
        if self.class_dim is None:
            self.class_dim = -1 if isinstance(model, LanguageModel) else 1

    def before_loss(self, state: State, logger: Logger) -> None:
        if not isinstance(state.outputs, Tensor):
            reason = "LabelSmoothing needs logits in a tensor, and a model that computes its loss from them afterwards"
            raise TypeError(f"outputs of type {type(state.outputs).__name__}: {reason}")
        assert self.class_dim is not None
        self._original = state.microbatch
        targets = get_item(state.microbatch, self.target_key)
        dim = self.class_dim
        logits = state.outputs.movedim(dim, 1)
        if self._loss_fn is not None and targets.shape == logits.shape[:1] + logits.shape[2:]:
            # In the instance dict, which hides a loss function that is a submodule.
            vars(state.unwrapped_model)["loss_fn"] = _smoothed(state.unwrapped_model, self._loss_fn, self.smoothing)
            return
        if targets.shape == state.outputs.shape:
            targets = targets.movedim(dim, 1)
        smoothed = smooth_labels(targets, logits, self.smoothing).movedim(1, dim)
        state.microbatch = with_item(state.microbatch, self.target_key, smoothed)

    def after_loss(self, state: State, logger: Logger) -> None:
        state.microbatch = self._original
        self._original = None
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        if isinstance(self._loss_fn, nn.Module):  # it is still a submodule, under the same name
            vars(state.unwrapped_model).pop("loss_fn", None)
        elif self._loss_fn is not None:
            vars(state.unwrapped_model)["loss_fn"] = self._loss_fn


def find_cross_entropy(model: Model, target_key: Key, class_dim: int | None) -> Any:
    """Return the loss function of a model if torch can smooth it, because it is cross entropy of class indices.

    Args:
        model: the model whose loss is smoothed.
        target_key: index or name of the targets in a batch.
        class_dim: dimension of the logits that holds the classes, if the user has set it; then torch cannot smooth.

    Returns:
        The loss function, or None if torch cannot smooth it.
    """
    loss_fn = getattr(model, "loss_fn", None)
    if class_dim is not None:
        return None
    if isinstance(model, LanguageModel):
        is_used = type(model).loss is LanguageModel.loss and target_key == 1 and loss_fn is F.cross_entropy
        return loss_fn if is_used else None
    if not isinstance(model, SupervisedModel) or type(model).loss is not SupervisedModel.loss:
        return None
    mean = read_loss(loss_fn)
    can_smooth = isinstance(mean, TargetMean) and mean.with_smoothing(0.0) is not None
    return loss_fn if can_smooth and target_key == model.targets else None


def _smoothed(model: Model, loss_fn: Any, smoothing: float) -> Callable[..., Tensor]:
    """Return a loss function with label smoothing that averages over the same weights as the model's `loss_weight`."""
    if isinstance(model, LanguageModel) or model.loss_averages == "samples":
        return partial(F.cross_entropy, label_smoothing=smoothing)
    smoothed = TargetMean(loss_fn, F.cross_entropy).with_smoothing(smoothing)
    assert smoothed is not None
    return smoothed
