"""Batch size warm-up: training starts with small batches."""

from __future__ import annotations

from runner import Algorithm, Logger, State
from runner.algorithms._batch import AUGMENTATIONS, pick_samples, refuse_alternating_flips
from runner.failures.checks import check_number


def scheduled_size(progress: float, start: float, duration: float, whole: int) -> int:
    """Return the number of samples to train on, at least 1, which rises linearly from start * whole to whole.

    Args:
        progress: fraction of training that has passed, in [0, 1].
        start: fraction of a batch at the beginning, in [0, 1].
        duration: fraction of training over which the size rises, in [0, 1].
        whole: number of samples in a batch.
    """
    fraction = 1.0 if progress >= duration else start + (1 - start) * progress / duration
    return max(1, round(whole * fraction))


class BatchSizeWarmup(Algorithm):
    """Trains on only the first samples of each batch, and on more and more of them until whole batches are used.

    The dropped samples are not seen in that epoch. An epoch keeps its number of batches, so it takes less time for the
    same number of steps. The size depends only on the timestamp, so nothing has to be saved, and nothing is random.
    Each rank keeps the same fraction of its samples. The sample count includes dropped samples; the token count does
    not.

    Args:
        start: fraction of a batch to train on at the beginning, above 0 and at most 1; at least one sample per rank.
        duration: fraction of training over which the size rises to the whole batch, in [0, 1].

    Raises:
        ValueError: an argument is out of range; or, at INIT, BatchAugment has flip='alternating', which needs whole
            batches.

    Evidence:
        Some: the noise of small batches costs little early in training (Smith et al. 2018, "Don't Decay the Learning
        Rate, Increase the Batch Size", arXiv:1711.00489; McCandlish et al. 2018, arXiv:1812.06162).
    """

    picks_samples = True
    runs_before = ("SelectiveBackprop", *AUGMENTATIONS)

    def __init__(self, start: float = 0.25, duration: float = 0.3) -> None:
        check_number("start", start, "(0, 1]")
        check_number("duration", duration, "[0, 1]")
        self.start = start
        self.duration = duration

    def init(self, state: State, logger: Logger) -> None:
        refuse_alternating_flips(state.algorithms)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        whole = state.unwrapped_model.num_samples(state.batch)
        kept = scheduled_size(state.get_elapsed_duration().value, self.start, self.duration, whole)
        if kept < whole:
            state.batch = pick_samples(state.batch, whole, slice(kept))
