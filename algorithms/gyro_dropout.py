"""Gyro dropout: dropout with masks that are drawn once, so that a few subnetworks are each trained for a long time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State, TimeUnit, stream_seed
from runner.algorithms._surgery import operate
from runner.failures.checks import check_counts, check_number, refuse_if
from runner.failures.errors import wrong_argument


def draw_masks(sigma: int, units: int, p: float, seed: int) -> Tensor:
    """Return the factors of each subnetwork's units, 0 or 1 / (1 - p), as a tensor (sigma, units) on the CPU.

    A unit is kept with the probability 1 - p, so that the expected factor is 1, as in evaluation.

    Args:
        sigma: number of subnetworks.
        units: number of units.
        p: probability of dropping a unit, in [0, 1).
        seed: seed of the draw.
    """
    kept = torch.rand(sigma, units, generator=torch.Generator().manual_seed(seed)) >= p
    return kept / (1 - p)


def assign(samples: int, start: int, batch_size: int, chosen: Tensor) -> Tensor:
    """Return the subnetwork of each sample; a batch is divided evenly, in order, among the chosen subnetworks.

    Args:
        samples: number of samples in the microbatch, N.
        start: position of the microbatch's first sample in the batch.
        batch_size: number of samples in the batch.
        chosen: indices (tau,) of the chosen subnetworks.

    Returns:
        Index (N,) of each sample's subnetwork, on the device of `chosen`.
    """
    index = torch.arange(start, start + samples, device=chosen.device)
    return chosen[index * len(chosen) // batch_size]


class _Assignment:
    """The subnetwork of each sample of the current microbatch, shared by all layers; None outside training."""

    rows: Tensor | None = None


class _GyroDropout(nn.Module):
    """Dropout with the masks of subnetworks, over the last dimension, or over the channels of (N, C, H, W).

    Args:
        p: probability of dropping a unit.
        sigma: number of subnetworks.
        seed: seed of this layer's masks.
        assignment: assignment of samples to subnetworks, shared by all layers.
    """

    def __init__(self, p: float, sigma: int, seed: int, assignment: _Assignment) -> None:
        super().__init__()
        self.p = p
        self.sigma = sigma
        self.seed = seed
        self.assignment = assignment
        self._masks = torch.empty(0, 0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs with each sample's units masked by its subnetwork; in evaluation, the inputs unchanged."""
        rows = self.assignment.rows
        if not self.training or rows is None:
            return inputs
        dim = 1 if inputs.ndim > 3 else inputs.ndim - 1
        if self._masks.shape[1] != inputs.shape[dim]:
            masks = draw_masks(self.sigma, inputs.shape[dim], self.p, self.seed)
            self._masks = masks.to(inputs.device, non_blocking=True)  # once, or when the shape changes
        if len(rows) != len(inputs):
            raise ValueError(
                f"inputs of shape {tuple(inputs.shape)}: GyroDropout needs the {len(rows)} samples of the microbatch "
                "in dimension 0"
            )
        shape = [len(inputs), *(size if i == dim else 1 for i, size in enumerate(inputs.shape) if i)]
        return inputs * self._masks.index_select(0, rows).to(inputs.dtype).view(shape)


class GyroDropout(Algorithm):
    """Replaces dropout with `sigma` subnetworks drawn at the start; `tau` at a time share the samples of a batch.

    The chosen subnetworks are trained for `tau / sigma` of all batches, and then `tau` are drawn again: each subnetwork
    is expected to be chosen once, and is trained for many batches in a row (Lee et al. 2022). A unit is a feature
    of the last dimension, dropped at all positions of a sequence, or a channel of an image. Every `nn.Dropout` is
    replaced, whatever its own probability. The draws depend only on (seed, config key, batch) and are the same on all
    ranks; each rank distributes its own samples over the subnetworks. Evaluation drops nothing.

    Args:
        p: probability of dropping a unit, in [0, 1).
        sigma: number of subnetworks, at least 1.
        tau: number of subnetworks trained at a time, from 1 to `sigma`.
        allow_no_match: whether to leave a model without dropout unchanged instead of raising an error.

    Raises:
        ValueError: an argument is out of range; at INIT, the model has no dropout; or, when training starts, the number
            of batches is not known.

    Evidence:
        Some: better than dropout for small networks in the paper (Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble
        Effect in Neural Network Training", MLSys 4); none for today's networks, which need little dropout.
    """

    def __init__(self, p: float = 0.5, sigma: int = 256, tau: int = 16, allow_no_match: bool = False) -> None:
        check_number("p", p, "[0, 1)", "a probability")
        check_counts(sigma=sigma, tau=tau)
        refuse_if(tau > sigma, "tau", tau, f"must not be above sigma={sigma!r}")
        self.p = p
        self.sigma = sigma
        self.tau = tau
        self.allow_no_match = allow_no_match
        self._assignment = _Assignment()
        self._batches_each = 1
        self._planned_for = ""  # the max_duration for which `_batches_each` was computed
        self._chosen = torch.empty(0, dtype=torch.int64)
        self._period = -1

    def init(self, state: State, logger: Logger) -> None:
        def replace(dropout: nn.Module, index: int) -> nn.Module:
            seed = stream_seed(state.rank_zero_seed, f"{self.config_key}.masks", index)
            return _GyroDropout(self.p, self.sigma, seed, self._assignment)

        operate(self, state, {nn.Dropout: replace}, "dropout", self.allow_no_match)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._period = -1
        if self._planned_for == str(state.max_duration):
            return  # in a resumed run, epochs may have a different number of batches
        try:
            batches = state.progress.convert(state.max_duration, TimeUnit.BATCH)
        except ValueError:
            raise wrong_argument(
                "max_duration",
                str(state.max_duration),
                "GyroDropout needs to know the number of batches; give max_duration in epochs ('ep') or batches ('ba')",
            ) from None
        self._batches_each = max(1, int(batches * self.tau / self.sigma))
        self._planned_for = str(state.max_duration)

    def batch_start(self, state: State, logger: Logger) -> None:
        period = state.timestamp.batch // self._batches_each
        if period != self._period:
            seed = stream_seed(state.rank_zero_seed, self.config_key, period)
            chosen = torch.randperm(self.sigma, generator=torch.Generator().manual_seed(seed))[: self.tau]
            self._chosen = chosen.to(state.device, non_blocking=True)
            self._period = period

    def before_forward(self, state: State, logger: Logger) -> None:
        count = state.unwrapped_model.num_samples
        self._assignment.rows = assign(
            count(state.microbatch), state.microbatch_start, count(state.batch), self._chosen
        )

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._assignment.rows = None

    def state_dict(self) -> dict[str, Any]:
        return {"batches_each": self._batches_each, "planned_for": self._planned_for}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches_each = state["batches_each"]
        self._planned_for = state["planned_for"]
