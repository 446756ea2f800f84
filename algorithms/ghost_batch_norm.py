"""Ghost batch norm: batch norm over small chunks of a large batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate
from runner.failures.checks import check_whole
from runner.models.training_mode import BATCH_NORMS


def normalize_in_chunks(norm: nn.Module, inputs: Tensor, size: int) -> Tensor:
    """Return inputs normalized chunk by chunk, each with its own mean and variance.

    Each chunk of n samples also updates the running statistics, one after another, as a batch of its own would. The
    mean of a chunk deviates from that of the whole batch by about s / sqrt(n), for values with the standard deviation
    s: this is the noise that a large batch lacks (Hoffer et al. 2017).

    Args:
        norm: batch norm layer.
        inputs: inputs (N, C, ...).
        size: largest number of samples in a chunk, at least 1; chunks are as equal in size as possible.
    """
    count = max(1, math.ceil(len(inputs) / size))
    smaller, num_larger = divmod(len(inputs), count)
    # Not tensor_split, whose gradient is a tensor of the whole size for each chunk.
    chunks = inputs.split([smaller + (index < num_larger) for index in range(count)])
    return torch.cat([norm(chunk) for chunk in chunks])


class _GhostNorm(nn.Module):
    """A batch norm that normalizes chunks in training, and is unchanged in evaluation.

    Args:
        norm: batch norm layer.
        size: largest number of samples in a chunk.
    """

    def __init__(self, norm: nn.Module, size: int) -> None:
        super().__init__()
        self.norm = norm
        self.ghost_batch_size = size

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the normalized inputs, see `normalize_in_chunks`."""
        if not self.norm.training:
            return self.norm(inputs)
        return normalize_in_chunks(self.norm, inputs, self.ghost_batch_size)


class GhostBatchNorm(Algorithm):
    """Applies each batch norm to chunks of a batch, for the noise of small batches when training with large ones.

    Chunks are parts of this rank's batch or microbatch. If microbatches hold a multiple of `ghost_batch_size` samples,
    gradients and running statistics equal those of the whole batch. `SyncBatchNorm`, which does the opposite, stays
    unchanged.

    Args:
        ghost_batch_size: largest number of samples in a chunk, at least 2.
        allow_no_match: whether to leave a model without batch norm unchanged instead of raising an error.

    Raises:
        ValueError: `ghost_batch_size` is out of range; or, at INIT, the model has no batch norm.

    Evidence:
        Some, for large batches (Hoffer et al. 2017, "Train longer, generalize better", arXiv:1705.08741); none for
        batches that are small already.
    """

    def __init__(self, ghost_batch_size: int = 32, allow_no_match: bool = False) -> None:
        check_whole("ghost_batch_size", ghost_batch_size, 2)
        self.ghost_batch_size = ghost_batch_size
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        def split(norm: nn.Module, index: int) -> nn.Module:
            return _GhostNorm(norm, self.ghost_batch_size)

        operate(self, state, {_is_batch_norm: split}, "batch norm", self.allow_no_match)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORMS) and not isinstance(module, nn.SyncBatchNorm)
