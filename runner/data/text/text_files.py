"""Language modelling on your own text files, as bytes or with a tokenizer of Hugging Face.

Tokens are held as uint8, uint16 or int32, in memory or in a memory-mapped file: with a tokenizer they are kept
in `cache`, under a name made from the files' paths, sizes and times of change and of the tokenizer's vocabulary and
version. One process tokenizes, and others that want the same tokens wait for it. Up to 1 GiB of tokens is moved to
the device as a whole, if there is room; otherwise batches are, as they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
    """Return a training and an evaluation loader over text files, joined in path order, and perhaps a test loader.

    Batches are `(inputs, targets)`, both int64 `(N, context)` in [0, size of the vocabulary); the targets are the
    inputs one token later. The text is cut into windows, so that every token but the first is a target once an epoch; a
    rest shorter than a window is left out. Each file is followed by the tokenizer's end-of-text token, if it has one.
    Files of more than 262,144 characters are tokenized in pieces that end with a line.

    Args:
        path: a text file, or a folder of them.
        pattern: which files within a folder, as `pathlib` understands it.
        eval_path: a file or folder of other texts to evaluate on; None keeps the end of the training text for that.
        eval_share: share of the tokens that is kept for evaluation, in (0, 1); not used with an eval_path.
        test_path: a file or folder of texts to test on; None keeps a part of the training text for that, if asked.
        test_share: share of the tokens that is kept for testing, the last ones; 0 keeps none.
        tokenizer: a folder, or a name on the Hub, for transformers' AutoTokenizer; None takes the bytes.
        pack_documents: whether windows hold whole files that do not attend to each other, see `PackedWindows`.
        cache: a folder in which tokens are kept; None tokenizes at each start, on each rank.
        seed: seed of the order of the training windows.

    For the other arguments see `WindowSizes`.

    Raises:
        ModuleNotFoundError: a tokenizer is asked for, and transformers is not installed.
        FileNotFoundError: a file or folder does not exist, or no file in it matches the pattern.
        OSError: the tokenizer cannot be loaded.
        ValueError: a number is out of range, a text is shorter than a window, a file for evaluation is trained on too,
            or a file for a tokenizer is not UTF-8.
    """

    path: LocalPath = "data/text"
    pattern: str = "**/*.txt"
    eval_path: LocalPath | None = None
    eval_share: float = 0.1
    test_path: LocalPath | None = None
    test_share: float = 0.0
    tokenizer: HubName | None = None
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
        first, *others = (_ends(*pair, encoder) for pair in zip(texts, files, strict=True))
        ends = _in_order(split_ends(first, counts), others, self.eval_path)
        key = [[_key(paths, encoder) for paths in files], counts]
        return packed_loaders(parts, ends, self, TokenCache(self.cache), key, self.seed)

    def fake(self) -> tuple[FakeLoader, ...]:
        """Return stand-ins for the loaders, of which the sizes of files tell how long they are."""
        shares, files, encoder = self._open()

        def count(paths: list[Path]) -> int:
            size = sum(path.stat().st_size for path in paths)
            if self.tokenizer is None:
                return size
            kept = TokenCache(self.cache).size(_key(paths, encoder), encoder.dtype)
            return max(size // BYTES_PER_TOKEN, 4 * self.context) if kept is None else kept

        counts = _in_order(split_tokens(count(files[0]), shares), map(count, files[1:]), self.eval_path)
        return fake_window_loaders(counts, encoder.vocab_size, self, self.pack_documents)

    def _open(self) -> tuple[list[float], list[list[Path]], Tokenizer]:
        """Check the arguments; return the shares kept for evaluation and testing, the files and the tokenizer."""
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
        return shares, files, load_tokenizer(self.tokenizer)


load_text_files = data_function("load_text_files", TextFiles)


def _in_order(kept: Iterable[Part], others: Iterable[Part], eval_path: str | None) -> list[Part]:
    """Return the parts of a text in the order: training, evaluation, testing.

    Args:
        kept: the training text, and the parts of it that are kept for something else, in this order.
        others: the texts of `eval_path` and `test_path`, as far as they are given.
        eval_path: a path, or None if a part of the training text is for evaluation.
    """
    train, *rest = kept
    return [train, *others, *rest] if eval_path is not None else [train, *rest, *others]


def _list_files(path: str, pattern: str, eval_path: str | None, test_path: str | None) -> list[list[Path]]:
    """Return the files of each given path, in the order in which they are concatenated."""
    given = {"path": path, "eval_path": eval_path, "test_path": test_path}
    found = {key: _find(key, one, pattern) for key, one in given.items() if one is not None}
    for one, other in combinations(found, 2):
        if both := sorted({*found[one]} & {*found[other]}):
            raise wrong_argument(other, given[other], f"{str(both[0])!r} is also in {one}; give different texts")
    return [*found.values()]


def _find(name: str, path: str, pattern: str) -> list[Path]:
    root = Path(path).expanduser().absolute()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"{name}={path!r}: does not exist; give a text file or a folder of text files")
    try:
        found = [file for file in root.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError, IndexError) as error:
        raise wrong_argument("pattern", pattern, f"{error}; give a pattern such as '**/*.txt'") from error
    if not found:
        raise FileNotFoundError(
            f"{name}={path!r}: no file in this folder matches pattern={pattern!r}; change the pattern"
        )
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _read(files: list[Path], encoder: Tokenizer, cache: str | None) -> Tensor:
    """Return the tokens `(n,)` of some files, one after another."""
    if not isinstance(encoder, HFTokenizer):  # as they are, whatever they hold
        content = bytearray().join(file.read_bytes() for file in files)
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    make = partial(encoder.encode_all, _pieces(files))
    return TokenCache(cache).tokens(_key(files, encoder), encoder.dtype, make)


def _ends(tokens: Tensor, files: list[Path], encoder: Tokenizer) -> NDArray[Any]:
    """Return after how many tokens each file ends."""
    if not isinstance(encoder, HFTokenizer):
        return numpy.cumsum([file.stat().st_size for file in files])
    return document_ends(tokens, end_token(encoder))


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
    """Return where to cut a text: after its last line end with no other white space next to it, or at its end."""
    *_, last = [len(text), *(found.end() for found in LINE_END.finditer(text, max(0, len(text) - PIECE // 4)))]
    return last
