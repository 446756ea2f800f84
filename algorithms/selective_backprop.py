"""Selective backprop: trains on the samples of a batch whose loss is high."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._batch import (
    AUGMENTATIONS,
    Key,
    get_images,
    pick_samples,
    refuse_alternating_flips,
    resize,
    with_item,
)
from runner.distributed.collectives import broadcast_buffers
from runner.failures.checks import check_number, check_numbers, check_whole
from runner.models.model import in_eval_mode
from runner.models.sample_losses import sample_losses


def draw_ranks(num_samples: int, keep: float, seed: int) -> Tensor:
    """Return distinct ranks (n,), int64, on the CPU, of the losses of the samples to keep; rank 0 is the lowest loss.

    Rank q N is drawn with the weight q^(1/keep - 1). The paper keeps each sample with a probability q^b (Jiang et al.
    2019); the mean of q^b over [0, 1] is 1 / (b + 1), which is `keep` for b = 1/keep - 1. Here, as in MosaicML
    Composer, the number of kept samples is fixed.

    Args:
        num_samples: number of samples, N.
        keep: fraction n / N of samples to keep, above 0 and at most 1; n is rounded down, and is at least 1.
        seed: seed of the draw.
    """
    weights = ((numpy.arange(num_samples) + 0.5) / num_samples) ** (1 / keep - 1)
    kept = max(1, int(keep * num_samples))
    ranks = numpy.random.default_rng(seed).choice(num_samples, kept, replace=False, p=weights / weights.sum())
    return torch.from_numpy(ranks)


def select(losses: Tensor, ranks: Tensor) -> Tensor:
    """Return the indices of the samples whose losses have the given ranks, in the order of the batch.

    Args:
        losses: loss (N,) of each sample.
        ranks: ranks (n,), int64, on the same device.
    """
    return losses.argsort(stable=True)[ranks].sort().values


@torch.no_grad()
def evaluate_losses(state: State, batch: Any) -> Tensor:
    """Return the loss of each sample of this rank's batch (N,) in evaluation mode. Must be called on all ranks.

    The model is left unchanged, except that all ranks have rank 0's buffers afterwards. Running statistics of other
    ranks are lost at each evaluation and each resume anyway, so losses must not depend on them.
    """
    model = state.unwrapped_model
    broadcast_buffers(model)
    with in_eval_mode(model):
        measure = state.precision.autocast(state.device)(lambda: sample_losses(model, model(batch), batch))
        return measure()


class SelectiveBackprop(Algorithm):
    """Trains on a part of each batch, in which samples with a high loss are more likely.

    Each batch takes an extra forward pass, in evaluation mode and without gradients, and saves the forward and backward
    passes of the dropped samples. Augmentations are applied only to the kept ones. The draw depends only on (seed,
    config key, batch), and the losses only on the weights and on rank 0's running statistics, which are broadcast
    first, so nothing has to be saved. Each rank selects among its own samples. The sample count includes dropped
    samples; training loss and metrics are those of the kept ones.

    Args:
        start: fraction of training after which selection begins, in [0, 1].
        end: fraction of training after which selection ends, in [0, 1], above `start`.
        keep: fraction of a batch to train on, above 0 and at most 1; at least one sample.
        scale_factor: scale of height and width of the images for the extra pass, to save time; above 0 and at most 1.
        interrupt: how often a whole batch is trained, in batches; 0 for never.
        input_key: index or name of the images (N, C, H, W) in a batch; used only with a `scale_factor` below 1.

    Raises:
        ValueError: an argument is out of range; at INIT, BatchAugment has flip='alternating', which needs whole
            batches; or, during training, `scale_factor` is below 1 and the inputs are not images.

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
        check_number("start", start, "[0, 1]")
        check_number("end", end, f"({start}, 1]")
        check_numbers("(0, 1]", keep=keep, scale_factor=scale_factor)
        check_whole("interrupt", interrupt, 0)
        self.start = start
        self.end = end
        self.keep = keep
        self.scale_factor = scale_factor
        self.interrupt = interrupt
        self.input_key = input_key

    def init(self, state: State, logger: Logger) -> None:
        refuse_alternating_flips(state.algorithms)

    def _selects(self, state: State) -> bool:
        is_whole = self.interrupt and (state.timestamp.batch + 1) % self.interrupt == 0
        return not is_whole and self.start <= state.get_elapsed_duration().value < self.end

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if not self._selects(state):
            return
        num_samples = state.unwrapped_model.num_samples(state.batch)
        losses = evaluate_losses(state, self._scaled(state.batch))
        ranks = draw_ranks(num_samples, self.keep, stream_seed(state.seed, self.config_key, state.timestamp.batch))
        index = select(losses, ranks.to(losses.device, non_blocking=True))
        state.batch = pick_samples(state.batch, num_samples, index)

    def _scaled(self, batch: Any) -> Any:
        if self.scale_factor == 1:
            return batch
        images = get_images(batch, self.input_key, "scale_factor below 1")
        height, width = (max(1, round(length * self.scale_factor)) for length in images.shape[2:])
        return with_item(batch, self.input_key, resize(images, (height, width)))
