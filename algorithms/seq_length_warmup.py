"""Sequence length warm-up: training starts on short sequences."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from runner import Algorithm, Logger, State
from runner.algorithms._batch import Key, get_item
from runner.algorithms._first_batch import first_batch
from runner.algorithms._sequences import cut_into_pieces
from runner.device.batch import map_tensors
from runner.failures.checks import check_counts, check_number, refuse_if


def scheduled_length(progress: float, duration: float, shortest: int, longest: int, step: int) -> int:
    """Return the length of sequences at a point of training, which rises linearly, in steps, and then stays.

    Args:
        progress: fraction of training that has passed, in [0, 1].
        duration: fraction of training over which the length rises, in [0, 1].
        shortest: length at the start, in tokens.
        longest: length after the warm-up, in tokens.
        step: lengths in between are multiples of this number of tokens.
    """
    if progress >= duration:
        return longest
    length = int(shortest + (longest - shortest) * progress / duration)
    return max(shortest, length - length % step)


@functools.lru_cache  # called for each batch, with a Python loop over all lengths
def divisor_near(whole: int, length: int, shortest: int) -> int:
    """Return the largest divisor of `whole` from `shortest` to `length`, or otherwise the next larger divisor."""
    divisors = [number for number in range(shortest, whole + 1) if whole % number == 0]
    return max([divisor for divisor in divisors if divisor <= length], default=divisors[0])


def truncate(batch: Any, whole: int, length: int) -> Any:
    """Return a batch with its tensors (N, whole, ...) cut to their first `length` positions; others stay unchanged."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, :length] if tensor.ndim > 1 and tensor.shape[1] == whole else tensor

    return map_tensors(batch, cut)


class SeqLengthWarmup(Algorithm):
    """Trains a language model on short sequences first, which are cheaper, and on longer ones later.

    The length depends only on the timestamp and is the same on all ranks, so nothing has to be saved, and nothing is
    random. The token count includes only trained tokens; the sample count counts the original sequences.

    Args:
        duration: fraction of training over which the length rises, from 0 (no warm-up) to 1.
        min_seq_length: length at the start, in tokens; at least 1.
        max_seq_length: length after the warm-up, in tokens; shorter sequences stay whole.
        step_size: lengths in between are multiples of this number of tokens, at least 1.
        truncate: whether to drop the tokens beyond the length. Otherwise each sequence is cut into several, so that no
            token is lost and a batch keeps its number of tokens; the length is then rounded down to one that divides
            the sequences evenly.
        input_key: index or name of the tokens (N, T) in a batch; all tensors (N, T, ...) are cut alike.

    Raises:
        ValueError: an argument is out of range; or, at FIT_START (during training if the data is not held in memory),
            the inputs are not tokens (N, T), or, with `truncate=False`, the batch has tensors without the dimension T.

    Evidence:
        Some: stable training with large batches and learning rates (Li et al. 2022, "The Stability-Efficiency Dilemma",
        arXiv:2108.06084), and fewer tokens to a given loss for small models. Cutting costs little if texts are long.
    """

    runs_after = ("ALiBi",)  # it sets the final length

    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        input_key: Key = 0,
    ) -> None:
        check_number("duration", duration, "[0, 1]")
        check_counts(min_seq_length=min_seq_length, max_seq_length=max_seq_length, step_size=step_size)
        reason = f"must be at least min_seq_length={min_seq_length!r}, in tokens"
        refuse_if(max_seq_length < min_seq_length, "max_seq_length", max_seq_length, reason)
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
        length = divisor_near(whole, length, shortest)
        return cut_into_pieces(batch, whole, length, "truncate=False", "set truncate=True")
