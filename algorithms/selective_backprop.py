"""Selective backprop: trains on those samples of a batch whose loss is high."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._arguments import check_range
from runner.algorithms._batch import (
    AUGMENTATIONS,
    Key,
    get_images,
    pick_samples,
    refuse_alternating_flips,
    resize,
    with_item,
)
from runner.algorithms._sample_losses import evaluate_losses
from runner.checks import check_whole


def draw_ranks(num_samples: int, keep: float, seed: int) -> Tensor:
    """Return which samples to keep, by the rank of their loss: (n,), int64, on the CPU, different, 0 the lowest loss.

    The sample at the fraction q of the ranks is drawn with a weight of q^(1/keep - 1), as in MosaicML Composer.

    Args:
        num_samples: N.
        keep: n / N, above 0 and at most 1; n is rounded down, and at least 1.
        seed: the draw depends on nothing else.
    """
    weights = ((numpy.arange(num_samples) + 0.5) / num_samples) ** (1 / keep - 1)
    kept = max(1, int(keep * num_samples))
    ranks = numpy.random.default_rng(seed).choice(num_samples, kept, replace=False, p=weights / weights.sum())
    return torch.from_numpy(ranks)


def select(losses: Tensor, ranks: Tensor) -> Tensor:
    """Return the numbers of the samples that have these ranks among the losses, in the order of the batch.

    Args:
        losses: (N,).
        ranks: (n,), int64, on the same device.
    """
    return losses.argsort(stable=True)[ranks].sort().values


class SelectiveBackprop(Algorithm):
    """Trains on a part of each batch, drawn so that samples with a high loss come first; their losses are evaluated.

    Each batch takes another forward pass, in evaluation mode and without gradients, and saves forward and backward of
    what is left out. Augmentations see only what is kept. The draw is a function of (seed, config key, batch), and the
    losses one of the weights and of rank 0's running statistics, which all ranks are given for it: nothing has to be
    saved. Each rank chooses among its own samples. Samples are counted as they were read. The loss and the metrics of
    training are those of the samples that were kept.

    Args:
        start: share of training after which it begins, in [0, 1].
        end: share of training after which it ends, in [0, 1], above `start`.
        keep: share of a batch that is trained, above 0 and at most 1; at least one sample.
        scale_factor: of height and width of the images whose losses are evaluated, to save time; above 0 and at most 1.
        interrupt: every so many batches one is trained whole; 0 for none.
        input_key: where the images (N, C, H, W) stand in a batch; only a `scale_factor` below 1 needs it.

    Raises:
        ValueError: an argument is out of range; at INIT, BatchAugment with flip='alternating', which must see whole
            batches; while training, `scale_factor` is below 1 and inputs are no images.

    Evidence:
        Some, on small data (Jiang et al. 2019, arXiv:1910.00762); none at equal time (Kaddour et al. 2023, "No Train No
        Gain", arXiv:2307.06440). Wrong labels have high losses too.
    """

    picks_samples = True
    runs_before = AUGMENTATIONS

    def __init__(
        self,
        start: float = 0.5,
        end: float = 0.9,
        keep: float = 0.5,
        scale_factor: float = 1.0,
        interrupt: int = 2,
        input_key: Key = 0,
    ) -> None:
        check_range("start", start, 0, 1)
        check_range("end", end, start, 1, above=True)
        check_range("keep", keep, 0, 1, above=True)
        check_range("scale_factor", scale_factor, 0, 1, above=True)
        check_whole("interrupt", interrupt, 0)
        self.start = start
        self.end = end
        self.keep = keep
        self.scale_factor = scale_factor
        self.interrupt = interrupt
        self.input_key = input_key

    def init(self, state: State, logger: Logger) -> None:
        refuse_alternating_flips(state.algorithms)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch
        is_whole = self.interrupt and (batch + 1) % self.interrupt == 0
        if is_whole or not self.start <= state.get_elapsed_duration().value < self.end:
            return
        num_samples = state.unwrapped_model.num_samples(state.batch)
        losses = evaluate_losses(state, self._scaled(state.batch))
        ranks = draw_ranks(num_samples, self.keep, stream_seed(state.seed, self.config_key, batch))
        index = select(losses, ranks.to(losses.device, non_blocking=True))
        state.batch = pick_samples(state.batch, num_samples, index)

    def _scaled(self, batch: Any) -> Any:
        if self.scale_factor == 1:
            return batch
        images = get_images(batch, self.input_key, "scale_factor below 1")
        height, width = (max(1, round(length * self.scale_factor)) for length in images.shape[2:])
        return with_item(batch, self.input_key, resize(images, (height, width)))
