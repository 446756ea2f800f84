"""A text for language modeling that every Python has: the bytes of the standard library's sources."""

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
from runner.failures.checks import check_whole

# Tests, installed packages, and a library that newer Pythons lack.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
SHARE = 16  # one file in sixteen is for evaluation, by the checksum of its path, and one for testing


def _fake(
    batch_size: int, context: int, eval_batch_size: int, eval_bytes: int, test_bytes: int, **_: Any
) -> tuple[FakeLoader, ...]:
    limits = _check(context, eval_bytes, test_bytes)
    sizes = [sum(path.stat().st_size for path in paths) for paths in _list_stdlib(len(limits))]
    train, *held_out = (count_windows(size, context, "bytes") for size in sizes)

    def make(samples: int) -> tuple[Tensor, Tensor]:
        # The largest byte, so that a model with too small a vocabulary fails.
        tokens = torch.full((samples, context), 255)
        return tokens, tokens

    counts = (min(count, limit // context) for count, limit in zip(held_out, limits, strict=True))
    return FakeLoader(make, train, batch_size), *(FakeLoader(make, count, eval_batch_size) for count in counts)


@faked_by(_fake)
def load_stdlib_text(
    batch_size: int = 8,
    context: int = 128,
    eval_batch_size: int = 64,
    eval_bytes: int = 131_072,
    test_bytes: int = 0,
    seed: int = 0,
) -> tuple[TensorLoader, ...]:
    """Return loaders over the `.py` files of this Python's standard library: training, evaluation and perhaps test.

    The tokens are bytes. Batches are `(inputs, targets)`, both int64 `(N, context)` in [0, 256); the targets are the
    inputs shifted by one byte. The text is cut into windows, so that every byte but the first is a target once an
    epoch; an incomplete last window is left out. A file is for evaluation if the CRC-32 of its path in the library is a
    multiple of 16 and, with `test_bytes`, for testing if it is one more. The text differs a little between versions of
    Python.

    Args:
        batch_size: windows in a training batch, all ranks together.
        context: window length, in bytes.
        eval_batch_size: windows in an evaluation batch, all ranks together.
        eval_bytes: maximum number of bytes to evaluate, in windows spread evenly over the evaluation text.
        test_bytes: the same for testing; 0: no test loader.
        seed: seed of the order of the training windows.

    Raises:
        FileNotFoundError: this Python comes without the sources of its library.
        ValueError: context is below 1 or longer than the text, or eval_bytes or test_bytes is less than one window.
    """
    limits = _check(context, eval_bytes, test_bytes)
    train, *held_out = (cut_windows(text, context, "bytes") for text in _read_stdlib(len(limits)))
    spread = (spread_windows(windows, limit) for windows, limit in zip(held_out, limits, strict=True))
    return (
        TensorLoader(train, batch_size=batch_size, shuffle=True, seed=seed, transform=next_token),
        *(TensorLoader(text, batch_size=eval_batch_size, shuffle=False, transform=next_token) for text in spread),
    )


def _check(context: int, eval_bytes: int, test_bytes: int) -> list[int]:
    """Check the arguments, and return the limits of the evaluation text and, with `test_bytes`, of the test text."""
    check_whole("context", context, 1, "a number of bytes")
    check_eval_limit("eval_bytes", eval_bytes, context, "bytes")
    if test_bytes:
        check_eval_limit("test_bytes", test_bytes, context, "bytes")
    return [eval_bytes, *([test_bytes] if test_bytes else [])]


def _list_stdlib(num_held_out: int = 1) -> list[list[Path]]:
    """Return the files of the training text, and of each of the held-out texts."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    texts: list[list[Path]] = [[] for _ in range(num_held_out + 1)]
    for path in sorted(paths):
        number = zlib.crc32(path.encode()) % SHARE
        texts[number + 1 if number < num_held_out else 0].append(root / path)
    if not all(texts):
        raise FileNotFoundError(
            f"{root} contains no sources of the standard library: this Python comes without them; use another data set"
        )
    return texts


def _read_stdlib(num_held_out: int = 1) -> list[Tensor]:
    """Return the texts of `_list_stdlib`, uint8 `(number of bytes,)` each."""
    texts = (bytearray().join(path.read_bytes() for path in paths) for paths in _list_stdlib(num_held_out))
    return [torch.frombuffer(text, dtype=torch.uint8) for text in texts]
