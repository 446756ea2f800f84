"""Gyro dropout: dropout whose masks are drawn once, so that few subnetworks are trained for long."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State, TimeUnit, stream_seed
from runner.algorithms._surgery import operate
from runner.checks import check_whole


def draw_masks(sigma: int, units: int, p: float, seed: int) -> Tensor:
    """Return what each of sigma subnetworks multiplies its units by: 0, or 1 / (1 - p); (sigma, units), on the CPU.

    Args:
        sigma: number of subnetworks.
        units: number of units.
        p: probability in [0, 1) with which a unit is dropped.
        seed: of the draw.
    """
    kept = torch.rand(sigma, units, generator=torch.Generator().manual_seed(seed)) >= p
    return kept / (1 - p)


def assign(samples: int, start: int, batch_size: int, chosen: Tensor) -> Tensor:
    """Return the subnetwork of each sample: a batch is cut into as many even runs as there are subnetworks chosen.

    Args:
        samples: N, in the microbatch.
        start: index in the batch of its first sample.
        batch_size: samples in the batch.
        chosen: (tau,) subnetworks.

    Returns:
        (N,), on the device of `chosen`.
    """
    index = torch.arange(start, start + samples, device=chosen.device)
    return chosen[index * len(chosen) // batch_size]


class _Assignment:
    """Which subnetwork each sample in flight goes through, the same in all layers; None outside of training."""

    rows: Tensor | None = None


class _GyroDropout(nn.Module):
    """Dropout with the masks of subnetworks, over the last dimension, or the channels of (N, C, H, W).

    Args:
        p: probability with which a unit is dropped.
        sigma: number of subnetworks.
        seed: of its masks.
        assignment: shared by all layers.
    """

    def __init__(self, p: float, sigma: int, seed: int, assignment: _Assignment) -> None:
        super().__init__()
        self.p, self.sigma, self.seed = p, sigma, seed
        self.assignment = assignment
        self._masks = torch.empty(0, 0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs, each sample's units masked by its subnetwork; in evaluation the inputs."""
        rows = self.assignment.rows
        if not self.training or rows is None:
            return inputs
        dim = 1 if inputs.ndim > 3 else inputs.ndim - 1
        if self._masks.shape[1] != inputs.shape[dim]:
            masks = draw_masks(self.sigma, inputs.shape[dim], self.p, self.seed)
            self._masks = masks.to(inputs.device, non_blocking=True)  # once, or when the shape changes
        if len(rows) != len(inputs):
            raise ValueError(
                f"GyroDropout needs inputs whose dimension 0 are the {len(rows)} samples, not {len(inputs)}"
            )
        shape = [len(inputs), *(size if i == dim else 1 for i, size in enumerate(inputs.shape) if i)]
        return inputs * self._masks.index_select(0, rows).to(inputs.dtype).view(shape)


class GyroDropout(Algorithm):
    """Replaces dropout: of `sigma` subnetworks drawn at the start, `tau` at a time share the samples of a batch.

    Chosen ones are trained for `tau / sigma` of all batches, then others are drawn. A unit is a feature of the last
    dimension, dropped at all positions of a sequence, or a channel of an image. All `nn.Dropout` are replaced, whatever
    their own probability. What is drawn is a function of (seed, config key, batch), the same on all ranks; each rank
    spreads its own batch over the subnetworks. Evaluation drops nothing.

    Args:
        p: probability with which a unit is dropped, in [0, 1).
        sigma: number of subnetworks, at least 1.
        tau: how many are trained at a time, from 1 to `sigma`.
        allow_no_match: leave a model without dropout as it is, rather than refuse it.

    Raises:
        ValueError: an argument is out of range; at INIT, the model has no dropout; when training starts, the number of
            batches is not known.

    Evidence:
        Some: better than dropout for small networks in the paper (Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble
        Effect in Neural Network Training", MLSys 4); none for networks of today, which need little dropout.
    """

    def __init__(self, p: float = 0.5, sigma: int = 256, tau: int = 16, allow_no_match: bool = False) -> None:
        if not 0 <= p < 1:
            raise ValueError(f"p={p!r}: must be a probability from 0 to below 1")
        check_whole("sigma", sigma, 1)
        check_whole("tau", tau, 1)
        if tau > sigma:
            raise ValueError(f"tau={tau!r}: must not be above sigma={sigma!r}")
        self.p = p
        self.sigma = sigma
        self.tau = tau
        self.allow_no_match = allow_no_match
        self._assignment = _Assignment()
        self._batches_each = 1
        self._chosen = torch.empty(0, dtype=torch.int64)
        self._period = -1

    def init(self, state: State, logger: Logger) -> None:
        def replace(dropout: nn.Module, index: int) -> nn.Module:
            seed = stream_seed(state.rank_zero_seed, f"{self.config_key}.masks", index)
            return _GyroDropout(self.p, self.sigma, seed, self._assignment)

        operate(self, state, {nn.Dropout: replace}, "dropout", self.allow_no_match)

    def fit_start(self, state: State, logger: Logger) -> None:
        try:
            batches = state.progress.convert(state.max_duration, TimeUnit.BATCH)
        except ValueError:
            raise ValueError(
                f"max_duration={str(state.max_duration)!r}: GyroDropout needs the number of batches; give ep or ba"
            ) from None
        self._batches_each = max(1, int(batches * self.tau / self.sigma))
        self._period = -1

    def batch_start(self, state: State, logger: Logger) -> None:
        period = state.timestamp.batch // self._batches_each
        if period != self._period:
            seed = stream_seed(state.rank_zero_seed, self.config_key, period)
            chosen = torch.randperm(self.sigma, generator=torch.Generator().manual_seed(seed))[: self.tau]
            self._chosen, self._period = chosen.to(state.device, non_blocking=True), period

    def before_forward(self, state: State, logger: Logger) -> None:
        count = state.unwrapped_model.num_samples
        samples, batch_size = count(state.microbatch), count(state.batch)
        self._assignment.rows = assign(samples, state.microbatch_start, batch_size, self._chosen)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._assignment.rows = None
