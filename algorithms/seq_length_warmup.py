"""Sequence length warm-up: training starts on short sequences."""

from __future__ import annotations

import functools
from typing import Any

from runner import Algorithm, Logger, State
from runner.algorithms._arguments import check_range
from runner.algorithms._batch import Key, get_item
from runner.algorithms._first_batch import first_batch
from runner.algorithms._sequences import cut_into_pieces
from runner.batch import map_tensors
from runner.checks import check_whole


def scheduled_length(progress: float, duration: float, shortest: int, longest: int, step: int) -> int:
    """Return the length of sequences at a point of training: it rises evenly, in steps, and then stays.

    Args:
        progress: share of training that is over, in [0, 1].
        duration: share of training in which the length rises, in [0, 1].
        shortest: length at the start, in tokens.
        longest: length after the warm-up, in tokens.
        step: lengths in between are multiples of it.
    """
    if progress >= duration:
        return longest
    length = int(shortest + (longest - shortest) * progress / duration)
    return max(shortest, length - length % step)


@functools.lru_cache  # asked for each batch, and in Python as long as a sequence
def divisor_near(whole: int, length: int, shortest: int) -> int:
    """Return the largest divisor of `whole` from `shortest` to `length`; if there is none, the next one above."""
    divisors = [one for one in range(shortest, whole + 1) if whole % one == 0]
    return max([one for one in divisors if one <= length], default=divisors[0])


def truncate(batch: Any, whole: int, length: int) -> Any:
    """Return a batch with the first `length` positions of its tensors (N, whole, ...); others stay as they are."""
    return map_tensors(batch, lambda one: one[:, :length] if one.ndim > 1 and one.shape[1] == whole else one)


class SeqLengthWarmup(Algorithm):
    """Trains a language model on short sequences first, which cost less, and on longer ones as training goes on.

    The length depends on the timestamp alone and is the same on all ranks: nothing has to be saved. There is nothing
    random. The tokens that training counts are those that it has seen; samples are counted as they were read.

    Args:
        duration: share of training in which the length rises, from 0 (no warm-up) to 1.
        min_seq_length: length at the start, in tokens; at least 1.
        max_seq_length: length after the warm-up, in tokens; sequences that are shorter stay whole.
        step_size: lengths in between are multiples of it, in tokens; at least 1.
        truncate: drop what is beyond the length. Otherwise each sequence is cut into several, so that no token is lost
            and a batch has as many as ever; the length is then the nearest below that divides the whole one.
        input_key: where the tokens (N, T) stand in a batch; all tensors (N, T, ...) are cut like them.

    Raises:
        ValueError: an argument is out of range; at FIT_START, or while training where data do not lie in memory, inputs
            are no token numbers (N, T), or with `truncate=False` the batch holds tensors without T.

    Evidence:
        Some: stable training with large batches and learning rates (Li et al. 2022, "The Stability-Efficiency Dilemma",
        arXiv:2108.06084) and fewer tokens to a loss for small models; cutting costs little where text is long.
    """

    runs_after = ("ALiBi",)  # which sets the length that this one leads to

    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        input_key: Key = 0,
    ) -> None:
        check_range("duration", duration, 0, 1)
        check_whole("min_seq_length", min_seq_length, 1)
        check_whole("max_seq_length", max_seq_length, 1)
        check_whole("step_size", step_size, 1)
        if max_seq_length < min_seq_length:
            raise ValueError(
                f"max_seq_length={max_seq_length!r}: must be at least min_seq_length={min_seq_length!r}, in tokens"
            )
        self.duration = duration
        self.min_seq_length = min_seq_length
        self.max_seq_length = max_seq_length
        self.step_size = step_size
        self.truncate = truncate
        self.input_key = input_key

    def fit_start(self, state: State, logger: Logger) -> None:
        batch = first_batch(state.train_dataloader)
        if batch is not None:
            self._shorten(batch, state.get_elapsed_duration().value)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        state.batch = self._shorten(state.batch, state.get_elapsed_duration().value)

    def _shorten(self, batch: Any, progress: float) -> Any:
        tokens = get_item(batch, self.input_key)
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(
                f"inputs of shape {tuple(tokens.shape)} and {tokens.dtype}: SeqLengthWarmup needs tokens (N, T)"
            )
        whole = tokens.shape[1]
        longest = min(self.max_seq_length, whole)
        shortest = min(self.min_seq_length, longest)
        length = scheduled_length(progress, self.duration, shortest, longest, self.step_size)
        if self.truncate:
            return truncate(batch, whole, length)
        even = divisor_near(whole, length, shortest)
        return cut_into_pieces(batch, whole, even, "truncate=False", "set truncate=True")
