"""Pack whole documents into windows by best fit, separated by positions that restart with each document."""

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

IGNORED = -100  # target of padding, which losses ignore


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign pieces to windows by best fit: longest first, each to the window in which it leaves the least room.

    The result is deterministic, and the assignment takes time proportional to the number of pieces. Source: Ding et
    al. 2024, "Fewer Truncations Improve Language Modeling", https://arxiv.org/abs/2404.10830.

    Args:
        lengths: lengths of the pieces, each in [1, capacity].
        capacity: length of a window.

    Returns:
        The indices of the pieces in each window.
    """
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity)]  # windows by the room left in them
    rooms = 0  # bit r is set if a window has room r
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
    """Windows of whole documents; documents longer than a window are cut into pieces that count as separate documents.

    Batches are `(inputs, targets, positions)`, int64 `(N, context)`: the targets are the inputs shifted by one token,
    and -100 after the last document of a window; positions count from 0 in each document.

    Args:
        tokens: tokens `(n,)` of all documents, in order: uint8, int16 (the bits of uint16) or int32.
        ends: end position of each document in the tokens, ascending; the last is n.
        context: length of a window, in tokens.
        cache: keeps the assignment of documents to windows.
        key: everything that the ends depend on, as JSON values.

    Raises:
        ValueError: no document has at least two tokens.
    """

    def __init__(self, tokens: Tensor, ends: NDArray[Any], context: int, cache: TokenCache, key: Any) -> None:
        self._tokens = tokens
        self._context = context
        starts = numpy.concatenate([[0], ends[:-1]])
        pairs = numpy.maximum(ends - starts - 1, 0)  # of a token and the next one, in each document
        counts = -(-pairs // context)
        offsets = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        self._starts = numpy.repeat(starts, counts) + offsets * context
        self._lengths = numpy.minimum(numpy.repeat(pairs, counts) - offsets * context, context)
        self._windows = self._assign(cache, key)
        if not len(self._windows):
            raise ValueError("no document has at least two tokens; give longer texts")

    def _assign(self, cache: TokenCache, key: Any) -> list[NDArray[Any]]:
        """Return the indices of the pieces in each window."""

        def make() -> Iterator[NDArray[Any]]:
            for window in best_fit(self._lengths.tolist(), self._context):
                yield numpy.array([*window[:-1], ~window[-1]], numpy.int32)  # ~ marks the last piece of a window

        pieces = cache.tokens(["packing", self._context, key], numpy.dtype(numpy.int32), make).numpy()
        window_ends = numpy.flatnonzero(pieces < 0) + 1
        return numpy.split(numpy.where(pieces < 0, ~pieces, pieces), window_ends)[:-1]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.read_batch([index]))

    def keep(self, windows: Sequence[int]) -> None:
        """Keep only the windows with these indices."""
        self._windows = [self._windows[number] for number in windows]

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the windows with these indices as a batch."""
        shape = len(indices), self._context
        inputs = torch.zeros(shape, dtype=torch.int64)
        targets = torch.full(shape, IGNORED)
        positions = torch.arange(self._context).repeat(len(indices), 1)
        for row, index in enumerate(indices):
            offset = 0
            for piece in self._windows[index]:
                start = int(self._starts[piece])
                length = int(self._lengths[piece])
                piece_inputs, piece_targets = self._pairs(self._tokens[None, start : start + length + 1])
                inputs[row, offset : offset + length] = piece_inputs[0]
                targets[row, offset : offset + length] = piece_targets[0]
                offset += length
                positions[row, offset:] = torch.arange(self._context - offset)
        return inputs, targets, positions

    def _pairs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets `(1, n)` of a piece of n + 1 tokens."""
        return next_token(tokens)


def end_token(encoder: Tokenizer) -> int:
    """Return the token with which a tokenizer ends a document.

    Raises:
        ValueError: the tokenizer has no end-of-text token.
    """
    end = getattr(encoder, "end", None)
    if end is None:
        reason = "needs a tokenizer with an end-of-text token; choose another tokenizer"
        raise wrong_argument("pack_documents", True, reason)
    return end


def document_ends(tokens: Tensor, end: int) -> NDArray[Any]:
    """Return the end position of each document in tokens; the token `end` marks the ends."""
    values = tokens.numpy()
    ends = numpy.flatnonzero((values.view(numpy.uint16) if values.dtype == numpy.int16 else values) == end) + 1
    return ends if len(ends) and ends[-1] == len(tokens) else numpy.append(ends, len(tokens))


def split_ends(ends: NDArray[Any], counts: Sequence[int]) -> list[NDArray[Any]]:
    """Return the ends of the documents within each part, for consecutive parts of `counts` tokens."""
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

    `ends` are the end positions of the documents in each part. Evaluation takes as many whole windows
    as fit into `eval_tokens`, spread evenly.

    Raises:
        ValueError: a part has no document of at least two tokens.
    """
    context = sizes.context
    train, *held_out = (
        PackedWindows(tokens, part_ends, context, cache, [key, use, len(tokens)])
        for tokens, part_ends, use in zip(parts, ends, PARTS, strict=False)
    )
    return loaders_of([train, *held_out], sizes, seed)


def loaders_of(parts: Sequence[Any], sizes: WindowSizes, seed: int) -> tuple[DatasetLoader, ...]:
    """Return a loader of each part, in the order of `PARTS`, with as many evaluation windows as `sizes` allows.

    Parts are `PackedWindows`, or data sets that also have `read_batch` and `keep`.
    """
    train, *held_out = parts
    if (limit := sizes.eval_tokens) is not None and len(held_out[0]) > limit // sizes.context:
        count = limit // sizes.context
        held_out[0].keep([number * len(held_out[0]) // count for number in range(count)])
    return (
        DatasetLoader(train, sizes.batch_size, shuffle=True, seed=seed),
        *(DatasetLoader(windows, sizes.eval_batch_size, shuffle=False) for windows in held_out),
    )
