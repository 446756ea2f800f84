"""Language modelling on your own text files, as bytes or with a tokenizer of Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.data.fake import FakeLoader, faked_by
from runner.data.loaders import OrderedLoader
from runner.data.text.token_cache import TokenCache, state_of
from runner.data.text.tokenizer import BYTES_PER_TOKEN, HFTokenizer, Tokenizer, load_tokenizer
from runner.data.text.windows import (
    WindowSizes,
    check_eval_share,
    check_windows,
    fake_window_loaders,
    split_tokens,
    window_loaders,
)

PIECE = 1 << 18  # characters of a file that are tokenized at once
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")


def _fake(
    path: str,
    pattern: str,
    eval_path: str | None,
    eval_share: float,
    tokenizer: str | None,
    cache: str | None,
    seed: int,
    **sizes: Any,
) -> tuple[FakeLoader, FakeLoader]:
    _check(WindowSizes(**sizes), eval_path, eval_share)
    files, eval_files = _list_files(path, pattern, eval_path)
    encoder = load_tokenizer(tokenizer)

    def count(files: list[Path]) -> int:
        size = sum(file.stat().st_size for file in files)
        if tokenizer is None:
            return size
        kept = TokenCache(cache).size(_key(files, encoder), encoder.dtype)
        return max(size // BYTES_PER_TOKEN, 4 * sizes["context"]) if kept is None else kept

    total = count(files)
    if eval_path is not None:
        return fake_window_loaders(total, count(eval_files), encoder.vocab_size, WindowSizes(**sizes))
    start = split_tokens(total, eval_share)
    return fake_window_loaders(start, total - start, encoder.vocab_size, WindowSizes(**sizes))


@faked_by(_fake)
def load_text_files(
    path: str = "data/text",
    pattern: str = "**/*.txt",
    eval_path: str | None = None,
    eval_share: float = 0.1,
    tokenizer: str | None = None,
    context: int = 128,
    batch_size: int = 8,
    eval_batch_size: int = 64,
    eval_tokens: int | None = None,
    cache: str | None = "~/.cache/experiment-runner/tokens",
    seed: int = 0,
) -> tuple[OrderedLoader, OrderedLoader]:
    """Return a training and an evaluation loader over text files, joined in the order of their paths.

    Batches are ``(inputs, targets)``, both int64 ``(N, context)`` in [0, size of the vocabulary); the targets are the
    inputs one token later. The text is cut into windows, so that every token but the first is a target once an epoch; a
    rest shorter than a window is left out. Each file is followed by the tokenizer's end-of-text token, if it has one.
    Files of more than 262,144 characters are tokenized in pieces that end with a line.

    Tokens are held as uint8, uint16 or int32, in memory or in a memory-mapped file: with a tokenizer they are kept
    in `cache`, under a name made from the files' paths, sizes and times of change and of the tokenizer's vocabulary and
    version. One process tokenizes, and others that want the same tokens wait for it. Up to 1 GiB of tokens is moved to
    the device as a whole; more than that, one batch at a time.

    Args:
        path: a text file, or a folder of them.
        pattern: which files within a folder, as ``pathlib`` understands it.
        eval_path: a file or folder of other texts to evaluate on; None keeps the end of the training text for that.
        eval_share: share of the tokens that is kept for evaluation, in (0, 1); not used with an eval_path.
        tokenizer: a folder, or a name on the Hub, for transformers' AutoTokenizer; None takes the bytes.
        context: window length, in tokens.
        batch_size: windows in a training batch, all ranks together.
        eval_batch_size: windows in an evaluation batch, all ranks together.
        eval_tokens: tokens that are evaluated at most, in windows spread evenly over the text; None evaluates all.
        cache: a folder in which tokens are kept; None tokenizes at each start, on each rank.
        seed: seed of the order of the training windows.

    Raises:
        ModuleNotFoundError: a tokenizer is asked for, and transformers is not installed.
        FileNotFoundError: a file or folder does not exist, or no file in it matches the pattern.
        OSError: the tokenizer cannot be loaded.
        ValueError: a number is out of range, a text is shorter than a window, a file for evaluation is trained on too,
            or a file for a tokenizer is not UTF-8.
    """
    sizes = WindowSizes(
        context=context, batch_size=batch_size, eval_batch_size=eval_batch_size, eval_tokens=eval_tokens
    )
    _check(sizes, eval_path, eval_share)
    files, eval_files = _list_files(path, pattern, eval_path)
    encoder = load_tokenizer(tokenizer)
    train = _read(files, encoder, cache)
    if eval_path is not None:
        return window_loaders(train, _read(eval_files, encoder, cache), seed, sizes)
    start = split_tokens(len(train), eval_share)
    return window_loaders(train[:start], train[start:], seed, sizes)


def _check(sizes: WindowSizes, eval_path: str | None, eval_share: float) -> None:
    check_windows(sizes)
    if eval_path is None:
        check_eval_share(eval_share)


def _list_files(path: str, pattern: str, eval_path: str | None) -> tuple[list[Path], list[Path]]:
    """Return the files to train on and those of an evaluation path, in the order in which they are joined."""
    train = _find("path", path, pattern)
    evaluation = [] if eval_path is None else _find("eval_path", eval_path, pattern)
    if both := sorted({*train} & {*evaluation}):
        raise ValueError(
            f"eval_path={eval_path!r}: {str(both[0])!r} is among the training texts; give texts outside of path"
        )
    return train, evaluation


def _find(name: str, path: str, pattern: str) -> list[Path]:
    root = Path(path).expanduser().absolute()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"{name}={path!r}: does not exist; give a text file, or a folder of them")
    try:
        found = [file for file in root.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError, IndexError) as error:
        raise ValueError(f"pattern={pattern!r}: {error}; give a pattern such as '**/*.txt'") from error
    if not found:
        raise FileNotFoundError(
            f"{name}={path!r}: no file in this folder matches pattern={pattern!r}; change the pattern"
        )
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _read(files: list[Path], encoder: Tokenizer, cache: str | None) -> Tensor:
    """Return the tokens ``(n,)`` of some files, one after another."""
    if not isinstance(encoder, HFTokenizer):  # as they are, whatever they hold
        content = bytearray().join(file.read_bytes() for file in files)
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    make = partial(encoder.encode_all, _pieces(files))
    return TokenCache(cache).tokens(_key(files, encoder), encoder.dtype, make)


def _key(files: list[Path], encoder: Tokenizer) -> Any:
    """Return all that the tokens of some files depend on, as a key of the cache."""
    return ["files", PIECE, encoder.identity, state_of(files)]


def _pieces(files: list[Path]) -> Iterator[tuple[str, bool]]:
    """Yield the text of some files in pieces, each with whether it ends a file."""
    for path in files:
        try:
            with path.open(encoding="utf-8", newline="") as file:  # newline="" keeps line ends
                text = file.read(PIECE)
                while more := file.read(PIECE):
                    cut = _cut(text)
                    yield text[:cut], False
                    text = text[cut:] + more
            yield text, True
        except UnicodeDecodeError as error:
            raise ValueError(
                f"path: {str(path)!r} is not UTF-8 ({error.reason}); convert it, or take bytes with tokenizer=null"
            ) from error


def _cut(text: str) -> int:
    """Return where to cut a text: after its last line end that has no other white space beside it, or at its end."""
    *_, last = [len(text), *(found.end() for found in LINE_END.finditer(text, max(0, len(text) - PIECE // 4)))]
    return last
