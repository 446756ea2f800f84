"""Cuts a long sequence of tokens into windows for language modeling, and makes loaders of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.data.fake import FakeLoader
from runner.data.loaders import OrderedLoader, TensorLoader
from runner.failures.checks import check_counts, check_number, refuse_if
from runner.failures.errors import wrong_argument

RESIDENT_BYTES = 1 << 30  # larger parts stay in host memory, and are copied to the device batch by batch


@dataclass(frozen=True, kw_only=True)
class WindowSizes:
    """The arguments that determine how tokens become batches.

    Args:
        context: window length, in tokens.
        batch_size: windows in a training batch, all ranks together.
        eval_batch_size: windows in an evaluation batch, all ranks together.
        eval_tokens: maximum number of tokens to evaluate, in windows spread evenly over the text; None evaluates all.
    """

    context: int = 128
    batch_size: int = 8
    eval_batch_size: int = 64
    eval_tokens: int | None = None


def check_windows(sizes: WindowSizes) -> None:
    """Check the arguments before anything is read.

    Raises:
        ValueError: one of the sizes is out of range.
    """
    check_counts(context=sizes.context, batch_size=sizes.batch_size, eval_batch_size=sizes.eval_batch_size)
    check_eval_limit("eval_tokens", sizes.eval_tokens, sizes.context, "tokens")


def check_eval_share(eval_share: float, test_share: float = 0.0) -> None:
    """Raise ValueError if the shares leave nothing to train on or nothing to evaluate on."""
    check_number("eval_share", eval_share, "(0, 1)")
    if not 0 <= test_share < 1 - eval_share:
        raise wrong_argument("test_share", test_share, "must be at least 0, and its sum with eval_share below 1")


def check_eval_limit(name: str, limit: int | None, context: int, unit: str) -> None:
    """Raise ValueError if `limit`, the argument `name`, is less than one window."""
    if limit is not None and limit < context:
        raise wrong_argument(name, limit, f"must be at least one window of context={context!r} {unit}")


def count_windows(size: int, context: int, unit: str = "tokens") -> int:
    """Return the number of windows in a text.

    The text needs one token more than the windows have inputs, because each target is the token after its input.

    Raises:
        ValueError: the text is too short for a single window.
    """
    refuse_if(size <= context, "context", context, f"must be shorter than the text, which has {size} {unit}; lower it")
    return (size - 1) // context


def cut_windows(tokens: Tensor, context: int, unit: str = "tokens") -> Tensor:
    """Return tokens `(n,)` as views `(windows, context + 1)`; each starts with the last token of the previous one.

    Raises:
        ValueError: the text is too short for a single window.
    """
    count_windows(len(tokens), context, unit)
    return tokens.unfold(0, context + 1, context)


def spread_windows(windows: Tensor, limit: int | None) -> Tensor:
    """Return windows spread evenly over the text, of at most `limit` tokens in total; None returns all windows."""
    count = len(windows) if limit is None else min(len(windows), limit // (windows.shape[1] - 1))
    return windows if count == len(windows) else windows[torch.arange(count) * len(windows) // count]


def next_token(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Split windows `(N, context + 1)` into `(inputs, targets)`, both int64 `(N, context)`.

    An int16 window holds the bits of uint16 tokens, because torch has few operations for uint16.
    """
    tokens = windows.long()
    if windows.dtype == torch.int16:
        tokens &= 0xFFFF
    return tokens[:, :-1], tokens[:, 1:]


vars(next_token)["equal_targets"] = True


PARTS = ("train", "evaluate", "test")
"""What each part of the tokens is used for, in the order of the loaders; a test part is optional."""


def window_loaders(parts: Iterable[Tensor], seed: int, sizes: WindowSizes) -> tuple[OrderedLoader, ...]:
    """Return loaders of the windows of each part: for training, for evaluation and, if there is a third, for testing.

    Batches are `(inputs, targets)`, see `next_token`. In each epoch, every token of a part but the first is a target
    once, except those of an incomplete last window. Windows for evaluation are spread evenly over their part.

    Args:
        parts: tokens `(n,)` on the CPU: uint8, int16 (the bits of uint16) or int32.
        seed: seed of the order of the training windows.
        sizes: sizes that `check_windows` has accepted.

    Raises:
        ValueError: a part is shorter than a window, or the seed is below 0.
    """
    train, *held_out = (
        cut_windows(tokens, sizes.context, f"tokens to {use} on") for tokens, use in zip(parts, PARTS, strict=False)
    )
    held_out[0] = spread_windows(held_out[0], sizes.eval_tokens)

    def loader(windows: Tensor, **options: Any) -> TensorLoader:
        return TensorLoader(windows, transform=next_token, resident=windows.nbytes <= RESIDENT_BYTES, **options)

    return (
        loader(train, batch_size=sizes.batch_size, shuffle=True, seed=seed),
        *(loader(windows, batch_size=sizes.eval_batch_size, shuffle=False) for windows in held_out),
    )


def fake_window_loaders(
    counts: Iterable[int], vocab_size: int, sizes: WindowSizes, has_positions: bool = False
) -> tuple[FakeLoader, ...]:
    """Return loaders of made-up batches to replace those of `window_loaders`; every token is the vocabulary's largest.

    `counts` holds the number of tokens of each part. With `has_positions`, positions are the third element of a batch.

    Raises:
        ValueError: a part is shorter than a window.
    """
    context = sizes.context
    limit = sizes.eval_tokens
    train, *held_out = (
        count_windows(count, context, f"tokens to {use} on") for count, use in zip(counts, PARTS, strict=False)
    )
    if limit is not None:
        held_out[0] = min(held_out[0], limit // context)

    def make(samples: int) -> tuple[Tensor, ...]:
        # The largest token, so that a model with too small a vocabulary fails.
        tokens = torch.full((samples, context), vocab_size - 1)
        return (tokens, tokens, torch.arange(context).expand(samples, -1)) if has_positions else (tokens, tokens)

    return (
        FakeLoader(make, train, sizes.batch_size),
        *(FakeLoader(make, windows, sizes.eval_batch_size) for windows in held_out),
    )


def split_tokens(size: int, shares: Iterable[float]) -> list[int]:
    """Divide `size` tokens: return the number for training and then the number for each of `shares`."""
    counts = [round(size * share) for share in shares]
    return [size - sum(counts), *counts]
