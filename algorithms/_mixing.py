"""Shared code of MixUp and CutMix: partners from the same batch, and interpolation of targets or losses.

Cross entropy is linear in the targets, so the loss of (1 - w) y + w y' is (1 - w) loss(y) + w loss(y'): up to
rounding, interpolated targets and interpolated losses are the same. A loss that takes only class indices needs
interpolated losses.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._batch import Key, class_probabilities, get_item, with_item
from runner.distributed.ranks import get_data_parallel_size
from runner.failures.checks import check_number
from runner.failures.errors import wrong_argument
from runner.models.target_mean import TargetMean, read_loss


def draw_partners(num_samples: int, seed: int) -> Tensor:
    """Return the index of each sample's partner (N,), int64, on the CPU: a permutation that the arguments determine."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))


def draw_weight(alpha: float, seed: int) -> float:
    """Return the weight of the partner in a blend: min(b, 1 - b), in [0, 0.5], with b ~ Beta(alpha, alpha).

    The minimum does not change the distribution of blends: partners are a random permutation, and with its inverse,
    which is just as likely, b and 1 - b exchange their roles. Each sample then makes up at least half of its own blend.
    """
    b = random.Random(seed).betavariate(alpha, alpha)
    return min(b, 1 - b)


def interpolate(values: Tensor, partners: Tensor, weight: float) -> Tensor:
    """Return (1 - weight) values + weight partners, for two floating-point tensors of the same shape and dtype."""
    return torch.lerp(values, partners, weight)


class Mixing(Algorithm, ABC):
    """Base of algorithms that mix each sample with a partner; a subclass draws the weight and mixes the inputs."""

    # Recipes with both alternate from batch to batch; both on one batch would blend more than two samples.
    conflicts_with = ("MixUp", "CutMix")

    def __init__(self, alpha: float, interpolate_loss: bool, input_key: Key, target_key: Key) -> None:
        check_number("alpha", alpha, "(0, inf]")
        self.alpha = alpha
        self.interpolate_loss = interpolate_loss
        self.input_key = input_key
        self.target_key = target_key
        self._weight = 0.0
        self._permutation = torch.empty(0, dtype=torch.int64)
        self._original: Any = None

    @abstractmethod
    def draw(self, inputs: Tensor, seed: int) -> float:
        """Draw how to mix this batch, and return the partners' weight in [0, 1]; the draw depends on `seed` alone."""

    @abstractmethod
    def mix(self, inputs: Tensor, partners: Tensor) -> Tensor:
        """Return the inputs (n, ...) of a microbatch, mixed with their partners as `draw` decided."""

    def init(self, state: State, logger: Logger) -> None:
        if self.interpolate_loss and any(
            type(algorithm).__name__ == "LabelSmoothing" for algorithm in state.algorithms
        ):
            raise ValueError(
                "interpolate_loss=True: this is for losses that accept only class indices, but LabelSmoothing turns "
                "targets into probabilities; set interpolate_loss=False, or remove LabelSmoothing"
            )
        is_split = get_data_parallel_size() > 1 or state.grad_accum > 1 or state.microbatch_size is not None
        mean = read_loss(getattr(state.unwrapped_model, "loss_fn", None))
        if isinstance(mean, TargetMean) and mean.has_weights and is_split:
            raise wrong_argument(
                "loss_fn",
                mean.loss_fn,
                f"with {type(self).__name__}, class weights or an ignore_index make the gradient depend on how "
                "the batch is split; train on one rank without microbatches, or use a loss without these",
            )

    def before_train_batch(self, state: State, logger: Logger) -> None:
        inputs = get_item(state.batch, self.input_key)
        seed = stream_seed(state.seed, self.config_key, state.timestamp.batch)
        self._weight = self.draw(inputs, seed)
        self._permutation = draw_partners(len(inputs), seed).to(inputs.device, non_blocking=True)

    def before_forward(self, state: State, logger: Logger) -> None:
        self._original = state.microbatch
        inputs = get_item(state.microbatch, self.input_key)
        mixed = self.mix(inputs, self._partners(state, self.input_key, len(inputs)))
        state.microbatch = with_item(state.microbatch, self.input_key, mixed)

    def before_loss(self, state: State, logger: Logger) -> None:
        if self.interpolate_loss:
            return
        if not isinstance(state.outputs, Tensor):
            name = type(self).__name__
            requirement = "logits (N, C, ...) in a tensor, and a model that computes its loss from them afterwards"
            raise TypeError(f"outputs of type {type(state.outputs).__name__}: {name} needs {requirement}")
        targets = get_item(state.microbatch, self.target_key)
        partners = self._partners(state, self.target_key, len(targets))
        own, other = (class_probabilities(labels, state.outputs) for labels in (targets, partners))
        state.microbatch = with_item(state.microbatch, self.target_key, interpolate(own, other, self._weight))

    def after_loss(self, state: State, logger: Logger) -> None:
        if self.interpolate_loss:
            targets = get_item(state.microbatch, self.target_key)
            partners = self._partners(state, self.target_key, len(targets))
            swapped = with_item(state.microbatch, self.target_key, partners)
            compute_loss = state.precision.autocast(state.device)(state.unwrapped_model.loss)
            state.loss = _interpolate_losses(state.loss, compute_loss(state.outputs, swapped), self._weight)
        state.microbatch = self._original
        self._original = None

    def _partners(self, state: State, key: Key, num_samples: int) -> Tensor:
        start = state.microbatch_start
        return get_item(state.batch, key)[self._permutation[start : start + num_samples]]


def _interpolate_losses(loss: Tensor | dict[str, Tensor], other: Any, weight: float) -> Tensor | dict[str, Tensor]:
    if isinstance(loss, Tensor):
        return interpolate(loss, other, weight)
    return {name: interpolate(value, other[name], weight) for name, value in loss.items()}
