"""Batch size warm-up: training starts with small batches."""

from __future__ import annotations

from runner import Algorithm, Logger, State
from runner.algorithms._arguments import check_range
from runner.algorithms._batch import AUGMENTATIONS, pick_samples, refuse_alternating_flips


def scheduled_size(progress: float, start: float, duration: float, whole: int) -> int:
    """Return the number of samples to train: it rises evenly from start * whole to whole; at least 1.

    Args:
        progress: share of training that is over, in [0, 1].
        start: share of a batch at the beginning, in [0, 1].
        duration: share of training in which it rises, in [0, 1].
        whole: samples in a batch.
    """
    risen = 1.0 if progress >= duration else start + (1 - start) * progress / duration
    return max(1, round(whole * risen))


class BatchSizeWarmup(Algorithm):
    """Trains on the first samples of each batch only, on more and more of them, until it trains whole batches.

    What it leaves out of a batch is not seen in that epoch, but an epoch has as many batches as ever: less time for it,
    and equally many steps. The size depends on the timestamp alone: nothing has to be saved. There is nothing random.
    Each rank keeps the same share of its samples. Samples are counted as they were read, tokens as they were trained.

    Args:
        start: share of a batch that is trained at the beginning, above 0 and at most 1; at least one sample per rank.
        duration: share of training in which it rises to the whole batch, in [0, 1].

    Raises:
        ValueError: an argument is out of range; at INIT, BatchAugment with flip='alternating', which must see whole
            batches.

    Evidence:
        Some: the noise of small batches costs little early in training (Smith et al. 2018, "Don't Decay the Learning
        Rate, Increase the Batch Size", arXiv:1711.00489; McCandlish et al. 2018, arXiv:1812.06162).
    """

    picks_samples = True
    runs_before = ("SelectiveBackprop", *AUGMENTATIONS)

    def __init__(self, start: float = 0.25, duration: float = 0.3) -> None:
        check_range("start", start, 0, 1, above=True)
        check_range("duration", duration, 0, 1)
        self.start = start
        self.duration = duration

    def init(self, state: State, logger: Logger) -> None:
        refuse_alternating_flips(state.algorithms)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        whole = state.unwrapped_model.num_samples(state.batch)
        kept = scheduled_size(state.get_elapsed_duration().value, self.start, self.duration, whole)
        if kept < whole:
            state.batch = pick_samples(state.batch, whole, slice(kept))
