"""MixUp: each sample is blended with another of its batch, and so are their targets."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from algorithms._batch import Key, class_probabilities, get_item, with_item
from runner import Algorithm, Logger, State, stream_seed


def draw_mixing(num_samples: int, alpha: float, seed: int) -> tuple[float, Tensor]:
    """Return how much of the partner to blend in, and everyone's partner.

    Args:
        num_samples: samples in the batch, N.
        alpha: of the Beta distribution, above 0.
        seed: the draw depends on nothing else.

    Returns:
        lambda = min(b, 1 - b) in [0, 0.5] with b ~ Beta(alpha, alpha), and a permutation (N,), int64, on the CPU.
    """
    b = random.Random(seed).betavariate(alpha, alpha)
    return min(b, 1 - b), torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))


def mix(values: Tensor, partners: Tensor, weight: float) -> Tensor:
    """Return (1 - weight) values + weight partners, for two tensors of one shape and floating dtype."""
    return torch.lerp(values, partners, weight)


class MixUp(Algorithm):
    """Trains on blends of two samples and their targets, one lambda per batch and rank.

    Partners come from the whole batch of this rank, also when it is split, so that k microbatches give the gradient
    of one. What is drawn is a function of (seed, config key, batch) alone: nothing has to be saved for a resumed run
    to draw the same. Neither the batch nor its targets are changed; metrics see the true targets.

    Args:
        alpha: of Beta(alpha, alpha); the larger, the more is blended. Above 0.
        interpolate_loss: blend two losses instead of the targets, for a loss that accepts class numbers only; takes a
            second evaluation of the loss.
        input_key: where the inputs stand in a batch, floating point (N, ...).
        target_key: where the targets stand: class numbers (N, ...) or probabilities (N, C, ...).

    Raises:
        ValueError: `alpha` is not above 0; `interpolate_loss` together with LabelSmoothing.
        TypeError: while training, inputs are no floating-point tensor, or outputs no tensor.

    Evidence:
        Strong for image classification with many epochs (Zhang et al. 2018, arXiv:1710.09412); none for a few epochs,
        where it slows training down.
    """

    def __init__(
        self, alpha: float = 0.2, interpolate_loss: bool = False, input_key: Key = 0, target_key: Key = 1
    ) -> None:
        if not alpha > 0:
            raise ValueError(f"alpha={alpha!r}: must be a number above 0")
        self.alpha = alpha
        self.interpolate_loss = interpolate_loss
        self.input_key = input_key
        self.target_key = target_key
        self._weight = 0.0
        self._permutation = torch.empty(0, dtype=torch.int64)
        self._original: Any = None

    def init(self, state: State, logger: Logger) -> None:
        if self.interpolate_loss and any(type(one).__name__ == "LabelSmoothing" for one in state.algorithms):
            raise ValueError(
                "interpolate_loss=True is for losses that accept class numbers only, and LabelSmoothing makes "
                "probabilities: set interpolate_loss=False, or remove LabelSmoothing"
            )

    def before_train_batch(self, state: State, logger: Logger) -> None:
        inputs = get_item(state.batch, self.input_key)
        if not inputs.is_floating_point():
            raise TypeError(f"inputs of {inputs.dtype}: MixUp blends floating-point inputs only")
        seed = stream_seed(state.seed, self.config_key, state.timestamp.batch)
        self._weight, permutation = draw_mixing(inputs.shape[0], self.alpha, seed)
        self._permutation = permutation.to(inputs.device, non_blocking=True)

    def before_forward(self, state: State, logger: Logger) -> None:
        self._original = state.microbatch
        inputs = get_item(state.microbatch, self.input_key)
        mixed = mix(inputs, self._partners(state, self.input_key, inputs.shape[0]), self._weight)
        state.microbatch = with_item(state.microbatch, self.input_key, mixed)

    def before_loss(self, state: State, logger: Logger) -> None:
        if self.interpolate_loss:
            return
        if not isinstance(state.outputs, Tensor):
            raise TypeError(f"outputs of type {type(state.outputs).__name__}: MixUp needs a tensor (N, C, ...)")
        targets = get_item(state.microbatch, self.target_key)
        partners = self._partners(state, self.target_key, targets.shape[0])
        own, other = (class_probabilities(one, state.outputs) for one in (targets, partners))
        state.microbatch = with_item(state.microbatch, self.target_key, mix(own, other, self._weight))

    def after_loss(self, state: State, logger: Logger) -> None:
        if self.interpolate_loss:
            targets = get_item(state.microbatch, self.target_key)
            partners = self._partners(state, self.target_key, targets.shape[0])
            swapped = with_item(state.microbatch, self.target_key, partners)
            compute_loss = state.precision.autocast(state.device)(state.unwrapped_model.loss)
            state.loss = _interpolate(state.loss, compute_loss(state.outputs, swapped), self._weight)
        state.microbatch, self._original = self._original, None

    def _partners(self, state: State, key: Key, num_samples: int) -> Tensor:
        start = state.microbatch_start
        return get_item(state.batch, key)[self._permutation[start : start + num_samples]]


def _interpolate(loss: Tensor | dict[str, Tensor], other: Any, weight: float) -> Tensor | dict[str, Tensor]:
    if isinstance(loss, Tensor):
        return mix(loss, other, weight)
    return {name: mix(value, other[name], weight) for name, value in loss.items()}
