"""Windows cut from one long run of tokens, for language modelling: loaders of them, and stand-ins for those."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

import torch
from torch import Tensor

from runner.data.fake import FakeLoader
from runner.data.loaders import OrderedLoader, TensorLoader

RESIDENT_BYTES = 1 << 30  # of tokens: so many are moved to the device whole; of more, each batch is


class WindowSizes(TypedDict):
    """The arguments that say how tokens become batches.

    Attributes:
        context: window length, in tokens.
        batch_size: windows in a training batch, all ranks together.
        eval_batch_size: windows in an evaluation batch, all ranks together.
        eval_tokens: at most so many tokens are evaluated; None is all.
    """

    context: int
    batch_size: int
    eval_batch_size: int
    eval_tokens: int | None


class HostLoader(OrderedLoader):
    """What a :class:`TensorLoader` yields, whose data stays in the memory or the file where it lies.

    Args:
        loader: yields the batches; it is not moved to a device, but each of its batches is.
    """

    def __init__(self, loader: TensorLoader) -> None:
        super().__init__(loader.order)
        self.loader = loader

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        return self.loader._batches(epoch, first)


def check_windows(sizes: WindowSizes) -> None:
    """Raises what is wrong with the arguments of packed tokens, before anything is read.

    Args:
        sizes: as given.

    Raises:
        ValueError: one of them is out of range.
    """
    for name in ("context", "batch_size", "eval_batch_size"):
        if sizes[name] < 1:
            raise ValueError(f"{name}={sizes[name]!r} must be at least 1")
    check_eval_limit("eval_tokens", sizes["eval_tokens"], sizes["context"], "tokens")


def check_eval_share(eval_share: float) -> None:
    """Raises ValueError for a share of the training data that leaves nothing to train or to evaluate on."""
    if not 0 < eval_share < 1:
        raise ValueError(f"eval_share={eval_share!r} must lie between 0 and 1, without either")


def check_eval_limit(name: str, limit: int | None, context: int, unit: str) -> None:
    """Raises ValueError for a limit of what is evaluated, an argument of this name, that is less than one window."""
    if limit is not None and limit < context:
        raise ValueError(f"{name}={limit!r} must be at least one window of context={context!r} {unit}")


def count_windows(size: int, context: int, unit: str = "tokens") -> int:
    """Returns how many windows a text has.

    Args:
        size: of the text.
        context: length of a window; one more is needed, as each target is the token after an input.
        unit: of both, for the message.

    Raises:
        ValueError: not a single one.
    """
    if size <= context:
        raise ValueError(f"context={context!r} is longer than the text of {size} {unit}")
    return (size - 1) // context


def cut_windows(tokens: Tensor, context: int, unit: str = "tokens") -> Tensor:
    """Returns views ``(windows, context + 1)`` of tokens ``(n,)``; each starts with the last token of the previous.

    Raises:
        ValueError: not a single window, see :func:`count_windows`.
    """
    count_windows(len(tokens), context, unit)
    return tokens.unfold(0, context + 1, context)


def spread_windows(windows: Tensor, limit: int | None) -> Tensor:
    """Returns as many windows as make at most so many tokens, spread evenly; None is all of them."""
    count = len(windows) if limit is None else min(len(windows), limit // (windows.shape[1] - 1))
    return windows if count == len(windows) else windows[torch.arange(count) * len(windows) // count]


def next_token(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``(inputs, targets)``, both int64 ``(N, context)``, of windows ``(N, context + 1)``.

    Those of int16 are taken for uint16, on which torch lacks operations.
    """
    tokens = windows.long()
    if windows.dtype == torch.int16:
        tokens &= 0xFFFF
    return tokens[:, :-1], tokens[:, 1:]


def window_loaders(
    train: Tensor, evaluation: Tensor, seed: int, sizes: WindowSizes
) -> tuple[OrderedLoader, OrderedLoader]:
    """Returns a training and an evaluation loader of the windows of two runs of tokens.

    Batches are ``(inputs, targets)``, see :func:`next_token`. Every token but the first is a target once an epoch; a
    rest shorter than a window is left out. The windows for evaluation are spread evenly over their tokens.

    Args:
        train: uint8, int16 (which stands for uint16) or int32 ``(n,)``, on the CPU.
        evaluation: likewise.
        seed: of the order of the training windows.
        sizes: checked.

    Raises:
        ValueError: less than a window of one of them, or a seed below 0.
    """
    train_windows = cut_windows(train, sizes["context"], "tokens to train on")
    eval_windows = cut_windows(evaluation, sizes["context"], "tokens to evaluate on")
    eval_windows = spread_windows(eval_windows, sizes["eval_tokens"])
    size, eval_size = sizes["batch_size"], sizes["eval_batch_size"]
    return (
        _loader(TensorLoader(train_windows, batch_size=size, shuffle=True, seed=seed, transform=next_token)),
        _loader(TensorLoader(eval_windows, batch_size=eval_size, shuffle=False, transform=next_token)),
    )


def fake_window_loaders(
    train_size: int, eval_size: int, vocab_size: int, sizes: WindowSizes
) -> tuple[FakeLoader, FakeLoader]:
    """Returns stand-ins for :func:`window_loaders`, of the largest token alone.

    Args:
        train_size: tokens to train on.
        eval_size: tokens to evaluate on.
        vocab_size: how many different tokens there are.
        sizes: checked.

    Raises:
        ValueError: less than a window of one of them.
    """
    context, limit = sizes["context"], sizes["eval_tokens"]
    train_windows = count_windows(train_size, context, "tokens to train on")
    eval_windows = count_windows(eval_size, context, "tokens to evaluate on")
    if limit is not None:
        eval_windows = min(eval_windows, limit // context)

    def make(samples: int) -> tuple[Tensor, Tensor]:
        # The largest token, so that a model with too small a vocabulary is found.
        tokens = torch.full((samples, context), vocab_size - 1)
        return tokens, tokens

    return (
        FakeLoader(make, train_windows, sizes["batch_size"]),
        FakeLoader(make, eval_windows, sizes["eval_batch_size"]),
    )


def split_tokens(size: int, eval_share: float) -> int:
    """Returns where the tokens for evaluation begin, the last share of so many."""
    return size - round(size * eval_share)


def _loader(loader: TensorLoader) -> OrderedLoader:
    windows = loader.tensors[0]
    return loader if windows.nbytes <= RESIDENT_BYTES else HostLoader(loader)
