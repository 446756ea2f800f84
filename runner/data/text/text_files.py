"""Language modeling on your own text files, as bytes or with a Hugging Face tokenizer.

Tokens are stored as uint8, uint16 or int32. Bytes are kept in memory, and tokens of a tokenizer in a memory-mapped file
in `cache`, whose name depends on the files' paths, sizes and modification times and on the tokenizer's vocabulary and
version. One process tokenizes, and others that need the same tokens wait for it. Up to 1 GiB of tokens is moved to the
device if it has room; otherwise batches are moved one by one, in their stored type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.data.fake import FakeLoader, data_function
from runner.data.loaders import OrderedLoader
from runner.data.text.packing import document_ends, end_token, packed_loaders, split_ends
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
from runner.failures.checks import check_number
from runner.failures.errors import wrong_argument
from runner.files.values import HubName, LocalPath

PIECE = 1 << 18  # characters of a file to tokenize at a time
Part = TypeVar("Part")
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")


@dataclass(frozen=True)
class TextFiles(WindowSizes):
    """Return a training, an evaluation and perhaps a test loader over text files, which are joined in path order.

    Batches are `(inputs, targets)`, both int64 `(N, context)` in [0, size of the vocabulary); the targets are the
    inputs shifted by one token. The text is cut into windows, so that every token but the first is a target once an
    epoch; an incomplete last window is left out. Each file is followed by the tokenizer's end-of-text token, if it has
    one. Files of more than 262,144 characters are tokenized in pieces that end at a line end.

    Args:
        path: a text file, or a folder of text files.
        pattern: pattern of the files to read in a folder, as for `pathlib`.
        eval_path: a file or folder of texts to evaluate on; None: a share of the training text.
        eval_share: share of the tokens held out for evaluation, in (0, 1); not used with an eval_path.
        test_path: a file or folder of texts to test on; None: a share of the training text, if `test_share` is not 0.
        test_share: share of the tokens held out for testing, the last tokens; 0: none.
        tokenizer: a folder, or a name on the Hub, for transformers' AutoTokenizer; None uses bytes.
        added_tokens: texts that become tokens of the tokenizer, in this order, unless they already are.
        pack_documents: whether windows hold whole files that do not attend to each other, see `PackedWindows`.
        cache: folder in which tokens are cached; None tokenizes at each start, on each rank.
        seed: seed of the order of the training windows.

    For the other arguments see `WindowSizes`.

    Raises:
        ModuleNotFoundError: a tokenizer is given, but transformers is not installed.
        FileNotFoundError: a file or folder does not exist, or no file in it matches the pattern.
        OSError: the tokenizer cannot be loaded.
        ValueError: a number is out of range, a text is shorter than a window, two paths share a file, or a file for a
            tokenizer is not UTF-8.
    """

    path: LocalPath = "data/text"
    pattern: str = "**/*.txt"
    eval_path: LocalPath | None = None
    eval_share: float = 0.1
    test_path: LocalPath | None = None
    test_share: float = 0.0
    tokenizer: HubName | None = None
    added_tokens: Sequence[str] = ()
    pack_documents: bool = False
    cache: LocalPath | None = "~/.cache/exactrun/tokens"
    seed: int = 0

    def load(self) -> tuple[OrderedLoader, ...]:
        """Return the loaders."""
        shares, files, encoder = self._open()
        texts = [_read(paths, encoder, self.cache) for paths in files]
        counts = split_tokens(len(texts[0]), shares)
        parts = _in_order(texts[0].split(counts), texts[1:], self.eval_path)
        if not self.pack_documents:
            return window_loaders(parts, self.seed, self)
        train_ends, *other_ends = (_find_ends(*pair, encoder) for pair in zip(texts, files, strict=True))
        ends = _in_order(split_ends(train_ends, counts), other_ends, self.eval_path)
        key = [[_key(paths, encoder) for paths in files], counts]
        return packed_loaders(parts, ends, self, TokenCache(self.cache), key, self.seed)

    def fake(self) -> tuple[FakeLoader, ...]:
        """Return loaders of made-up batches, with lengths based on the sizes of the files."""
        shares, files, encoder = self._open()

        def count(paths: list[Path]) -> int:
            size = sum(path.stat().st_size for path in paths)
            if self.tokenizer is None:
                return size
            cached = TokenCache(self.cache).size(_key(paths, encoder), encoder.dtype)
            return max(size // BYTES_PER_TOKEN, 4 * self.context) if cached is None else cached

        counts = _in_order(split_tokens(count(files[0]), shares), map(count, files[1:]), self.eval_path)
        return fake_window_loaders(counts, encoder.vocab_size, self, self.pack_documents)

    def _open(self) -> tuple[list[float], list[list[Path]], Tokenizer]:
        """Check the arguments; return the shares held out for evaluation and testing, the files and the tokenizer."""
        check_windows(self)
        if self.test_path is not None and self.test_share:
            reason = "give a share of the training text or test_path, not both"
            raise wrong_argument("test_share", self.test_share, reason)
        if self.eval_path is None:
            check_eval_share(self.eval_share, self.test_share)
        else:
            check_number("test_share", self.test_share, "[0, 1)")
        shares = [
            *([self.eval_share] if self.eval_path is None else []),
            *([self.test_share] if self.test_share else []),
        ]
        files = _list_files(self.path, self.pattern, self.eval_path, self.test_path)
        return shares, files, load_tokenizer(self.tokenizer, self.added_tokens)


load_text_files = data_function("load_text_files", TextFiles)


def _in_order(parts: Iterable[Part], other_texts: Iterable[Part], eval_path: str | None) -> list[Part]:
    """Return parts in the order training, evaluation, testing.

    Args:
        parts: the parts of the text of `path`: for training, then those held out for evaluation and testing.
        other_texts: the texts of `eval_path` and `test_path`, if given.
        eval_path: a path, or None if a part of the training text is for evaluation.
    """
    train, *held_out = parts
    return [train, *other_texts, *held_out] if eval_path is not None else [train, *held_out, *other_texts]


def _list_files(path: str, pattern: str, eval_path: str | None, test_path: str | None) -> list[list[Path]]:
    """Return the files of each path that is given, in the order in which they are joined."""
    paths = {"path": path, "eval_path": eval_path, "test_path": test_path}
    files = {key: _find_files(key, path, pattern) for key, path in paths.items() if path is not None}
    for key, other_key in combinations(files, 2):
        if shared := sorted({*files[key]} & {*files[other_key]}):
            reason = f"{str(shared[0])!r} is also in {key}; give different texts"
            raise wrong_argument(other_key, paths[other_key], reason)
    return [*files.values()]


def _find_files(key: str, path: str, pattern: str) -> list[Path]:
    root = Path(path).expanduser().absolute()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"{key}={path!r}: does not exist; give a text file or a folder of text files")
    try:
        files = [file for file in root.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError, IndexError) as error:
        raise wrong_argument("pattern", pattern, f"{error}; give a pattern such as '**/*.txt'") from error
    if not files:
        raise FileNotFoundError(
            f"{key}={path!r}: no file in this folder matches pattern={pattern!r}; change the pattern"
        )
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _read(files: list[Path], encoder: Tokenizer, cache: str | None) -> Tensor:
    """Return the tokens `(n,)` of files, in order."""
    if not isinstance(encoder, HFTokenizer):  # bytes need not be valid UTF-8
        content = bytearray().join(file.read_bytes() for file in files)
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    make = partial(encoder.encode_all, _pieces(files))
    return TokenCache(cache).tokens(_key(files, encoder), encoder.dtype, make)


def _find_ends(tokens: Tensor, files: list[Path], encoder: Tokenizer) -> NDArray[Any]:
    """Return the end position of each file in the tokens."""
    if not isinstance(encoder, HFTokenizer):
        return numpy.cumsum([file.stat().st_size for file in files])
    return document_ends(tokens, end_token(encoder))


def _key(files: list[Path], encoder: Tokenizer) -> Any:
    """Return everything that the tokens of files depend on, as a key of the cache."""
    return ["files", PIECE, encoder.identity, state_of(files)]


def _pieces(files: list[Path]) -> Iterator[tuple[str, bool]]:
    """Yield the text of files in pieces: (text, whether it ends a file)."""
    for path in files:
        try:
            with path.open(encoding="utf-8", newline="") as file:  # newline="" keeps line ends
                text = file.read(PIECE)
                while more := file.read(PIECE):
                    end = _find_cut(text)
                    yield text[:end], False
                    text = text[end:] + more
            yield text, True
        except UnicodeDecodeError as error:
            raise ValueError(
                f"path: {str(path)!r} is not UTF-8 ({error.reason}); convert it, or take bytes with tokenizer=null"
            ) from error


def _find_cut(text: str) -> int:
    """Return the position at which to cut a text: after its last line end without other white space, or at its end."""
    *_, last = [len(text), *(match.end() for match in LINE_END.finditer(text, max(0, len(text) - PIECE // 4)))]
    return last
