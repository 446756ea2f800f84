"""A text for language modelling that every Python has: the bytes of the standard library's own sources."""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.data.fake import FakeLoader, faked_by
from runner.data.loaders import TensorLoader
from runner.data.text.windows import check_eval_limit, count_windows, cut_windows, next_token, spread_windows

# Tests, installed packages, and a library that the newer Pythons lack.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
EVAL_SHARE = 16  # one file in sixteen, by the checksum of its path


def _fake(
    batch_size: int, context: int, eval_batch_size: int, eval_bytes: int, **_: Any
) -> tuple[FakeLoader, FakeLoader]:
    _check(context, eval_bytes)
    train_bytes, all_eval_bytes = (sum(path.stat().st_size for path in paths) for paths in _list_stdlib())
    eval_windows = min(count_windows(all_eval_bytes, context, "bytes"), eval_bytes // context)

    def make(samples: int) -> tuple[Tensor, Tensor]:
        # The largest byte, so that a model with too small a vocabulary is found.
        tokens = torch.full((samples, context), 255)
        return tokens, tokens

    train = FakeLoader(make, count_windows(train_bytes, context, "bytes"), batch_size)
    return train, FakeLoader(make, eval_windows, eval_batch_size)


@faked_by(_fake)
def load_stdlib_text(
    batch_size: int = 8,
    context: int = 128,
    eval_batch_size: int = 64,
    eval_bytes: int = 131_072,
    seed: int = 0,
) -> tuple[TensorLoader, TensorLoader]:
    """Return a training and an evaluation loader over the ``.py`` files of this Python's standard library.

    The tokens are bytes. Batches are ``(inputs, targets)``, both int64 ``(N, context)`` in [0, 256); the targets are
    the inputs one byte later. The text is cut into windows, so that every byte but the first is a target once an epoch;
    a rest shorter than a window is left out. A file is for evaluation when the CRC-32 of its path in the library is a
    multiple of 16. The text differs a little between versions of Python.

    Args:
        batch_size: windows in a training batch, all ranks together.
        context: window length, in bytes.
        eval_batch_size: windows in an evaluation batch, all ranks together.
        eval_bytes: bytes that are evaluated at most, in windows spread evenly over the evaluation text.
        seed: seed of the order of the training windows.

    Raises:
        FileNotFoundError: this Python comes without the sources of its library.
        ValueError: context is below 1 or longer than the text, or eval_bytes is less than one window.
    """
    _check(context, eval_bytes)
    train_text, eval_text = _read_stdlib()
    eval_windows = spread_windows(cut_windows(eval_text, context, "bytes"), eval_bytes)
    train = TensorLoader(
        cut_windows(train_text, context, "bytes"), batch_size=batch_size, shuffle=True, seed=seed, transform=next_token
    )
    evaluation = TensorLoader(eval_windows, batch_size=eval_batch_size, shuffle=False, transform=next_token)
    return train, evaluation


def _check(context: int, eval_bytes: int) -> None:
    if context < 1:
        raise ValueError(f"context={context!r}: must be at least 1 byte")
    check_eval_limit("eval_bytes", eval_bytes, context, "bytes")


def _list_stdlib() -> tuple[list[Path], list[Path]]:
    """Return the files of the training and of the evaluation text."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    train: list[Path] = []
    evaluation: list[Path] = []
    for path in sorted(paths):
        (evaluation if zlib.crc32(path.encode()) % EVAL_SHARE == 0 else train).append(root / path)
    if not train or not evaluation:
        raise FileNotFoundError(
            f"{root} holds no sources of the standard library: this Python comes without them; use another data set"
        )
    return train, evaluation


def _read_stdlib() -> tuple[Tensor, Tensor]:
    """Return the training and the evaluation text, uint8 ``(number of bytes,)`` each."""
    texts = (bytearray().join(path.read_bytes() for path in paths) for paths in _list_stdlib())
    train, evaluation = (torch.frombuffer(text, dtype=torch.uint8) for text in texts)
    return train, evaluation
