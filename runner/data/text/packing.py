"""Windows of whole documents: packed by best fit, and separated by positions that restart with each document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.loaders import DatasetLoader
from runner.data.text.token_cache import TokenCache
from runner.data.text.tokenizer import Tokenizer
from runner.data.text.windows import PARTS, WindowSizes, next_token
from runner.failures.errors import wrong_argument

IGNORED = -100  # target of padding, which no loss counts


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return which pieces share a window, by best fit: the longest first, each where it leaves the least room.

    It depends on nothing else, and takes time in proportion to the number of pieces. Source: Ding et al. 2024, "Fewer
    Truncations Improve Language Modeling", https://arxiv.org/abs/2404.10830.

    Args:
        lengths: lengths of the pieces, each in [1, capacity].
        capacity: length of a window.

    Returns:
        The numbers of the pieces in each window.
    """
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity)]  # windows by their room
    rooms = 0  # bit r is set where there is a window with room r
    for piece in numpy.argsort(-numpy.asarray(lengths), kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room = capacity
            window = len(windows)
            windows.append([])
        windows[window].append(piece)
        if left := room - length:
            with_room[left].append(window)
            rooms |= 1 << left
    return windows


class PackedWindows(Dataset[tuple[Tensor, ...]]):
    """Windows of whole documents; one longer than a window is cut into pieces, which count as separate documents.

    Batches are `(inputs, targets, positions)`, int64 `(N, context)`: the targets are the inputs one token later, and
    -100 at the end of a window that is not full; positions count from 0 in each document.

    Args:
        tokens: tokens of the documents, one after another, uint8, int16 (which stands for uint16) or int32 `(n,)`.
        ends: after how many tokens each document ends, ascending; the last is n.
        context: length of a window, in tokens.
        cache: keeps which documents share a window.
        key: all that the ends depend on, made of what JSON can hold.

    Raises:
        ValueError: no document has two tokens.
    """

    def __init__(self, tokens: Tensor, ends: NDArray[Any], context: int, cache: TokenCache, key: Any) -> None:
        self._tokens = tokens
        self._context = context
        begins = numpy.concatenate([[0], ends[:-1]])
        pairs = numpy.maximum(ends - begins - 1, 0)  # of a token and the one after it
        counts = -(-pairs // context)
        offsets = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        self._starts = numpy.repeat(begins, counts) + offsets * context
        self._lengths = numpy.minimum(numpy.repeat(pairs, counts) - offsets * context, context)

        def make() -> Iterator[NDArray[Any]]:
            for window in best_fit(self._lengths.tolist(), context):
                yield numpy.array([*window[:-1], ~window[-1]], numpy.int32)  # the last of a window is below 0

        kept = cache.tokens(["packing", context, key], numpy.dtype(numpy.int32), make).numpy()
        last = numpy.flatnonzero(kept < 0) + 1
        self._windows = numpy.split(numpy.where(kept < 0, ~kept, kept), last[:-1])
        if not len(last):
            raise ValueError("no document has two tokens; give longer texts")

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(one[0] for one in self.read_batch([index]))

    def keep(self, windows: Sequence[int]) -> None:
        """Keep some windows, and forget the others."""
        self._windows = [self._windows[one] for one in windows]

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return some windows as a batch."""
        shape = len(indices), self._context
        inputs = torch.zeros(shape, dtype=torch.int64)
        targets = torch.full(shape, IGNORED)
        positions = torch.arange(self._context).repeat(len(indices), 1)
        for row, index in enumerate(indices):
            at = 0
            for piece in self._windows[index]:
                start = int(self._starts[piece])
                length = int(self._lengths[piece])
                one, other = next_token(self._tokens[None, start : start + length + 1])
                inputs[row, at : at + length] = one[0]
                targets[row, at : at + length] = other[0]
                at += length
                positions[row, at:] = torch.arange(self._context - at)
        return inputs, targets, positions


def end_token(encoder: Tokenizer) -> int:
    """Return the token by which a tokenizer ends a document.

    Raises:
        ValueError: the tokenizer has no token that ends a text.
    """
    end = getattr(encoder, "end", None)
    if end is None:
        reason = "needs a tokenizer with an end-of-text token; choose another tokenizer"
        raise wrong_argument("pack_documents", True, reason)
    return end


def document_ends(tokens: Tensor, end: int) -> NDArray[Any]:
    """Return the end position of each document, in tokens where one value marks the ends."""
    values = tokens.numpy()
    ends = numpy.flatnonzero((values.view(numpy.uint16) if values.dtype == numpy.int16 else values) == end) + 1
    return ends if len(ends) and ends[-1] == len(tokens) else numpy.append(ends, len(tokens))


def split_ends(ends: NDArray[Any], counts: Sequence[int]) -> list[NDArray[Any]]:
    """Return the ends of the documents in each part of some tokens, given how many tokens the parts have."""
    parts = []
    start = 0
    for count in counts:
        inside = ends[(ends > start) & (ends < start + count)] - start
        parts.append(numpy.append(inside, count))
        start += count
    return parts


def packed_loaders(
    parts: Sequence[Tensor], ends: Sequence[NDArray[Any]], sizes: WindowSizes, cache: TokenCache, key: Any, seed: int
) -> tuple[DatasetLoader, ...]:
    """Return a training, an evaluation and perhaps a test loader of `PackedWindows`.

    `ends` are the end positions of the documents of each part; `eval_tokens` are counted in whole windows, spread
    evenly.

    Raises:
        ValueError: a part has no document of two tokens.
    """
    context = sizes.context
    train, *others = (
        PackedWindows(tokens, one, context, cache, [key, use, len(tokens)])
        for tokens, one, use in zip(parts, ends, PARTS, strict=False)
    )
    if (limit := sizes.eval_tokens) is not None and len(others[0]) > limit // context:
        count = limit // context
        others[0].keep([one * len(others[0]) // count for one in range(count)])
    return (
        DatasetLoader(train, sizes.batch_size, shuffle=True, seed=seed),
        *(DatasetLoader(one, sizes.eval_batch_size, shuffle=False) for one in others),
    )
