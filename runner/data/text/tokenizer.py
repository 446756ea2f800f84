"""Turn texts into tokens: bytes, or those of a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from runner.failures.checks import refuse_if
from runner.libraries.hugging_face import import_hf
from runner.libraries.targets import prepare_import

BATCH_CHARACTERS = 1 << 20  # of texts that are tokenized together, in parallel
BATCH_TEXTS = 1000
BYTES_PER_TOKEN = 4  # a guess, for texts that have not been tokenized yet


class Tokenizer(ABC):
    """Turns texts into tokens.

    Attributes:
        vocab_size: size of the vocabulary: the largest token plus one.
        identity: everything that the tokens of a text depend on, as JSON values.
    """

    vocab_size: int
    identity: Any

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """The narrowest of uint8, uint16 and int32 that holds every token."""
        sizes = ((1 << 8, numpy.uint8), (1 << 16, numpy.uint16))
        return numpy.dtype(next((dtype for size, dtype in sizes if self.vocab_size <= size), numpy.int32))

    @abstractmethod
    def encode(self, texts: list[tuple[str, bool]]) -> NDArray[Any]:
        """Return the tokens `(n,)` of all texts, in order.

        Args:
            texts: pairs (text, whether it ends a document); the end-of-text token, if the tokenizer has one, follows
                each document.
        """

    def encode_all(self, texts: Iterable[tuple[str, bool]]) -> Iterator[NDArray[Any]]:
        """Yield the tokens of any number of texts, batch by batch; for the arguments see `encode`."""
        batch: list[tuple[str, bool]] = []
        size = 0
        for text, is_end in texts:
            batch.append((text, is_end))
            size += len(text)
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_TEXTS:
                yield self.encode(batch)
                batch = []
                size = 0
        if batch:
            yield self.encode(batch)


class ByteTokenizer(Tokenizer):
    """Uses the bytes of UTF-8 as tokens; nothing marks the end of a document."""

    vocab_size = 256
    identity = "bytes"

    def encode(self, texts: list[tuple[str, bool]]) -> NDArray[Any]:
        """Return the bytes `(n,)` of the texts."""
        return numpy.frombuffer("".join(text for text, _ in texts).encode(), numpy.uint8)


class HFTokenizer(Tokenizer):
    """A transformers tokenizer. It adds no tokens for chats or for the start and end of sentences.

    Args:
        name: a folder, or a name on the Hub, such as gpt2.
        added_tokens: texts that become tokens of their own, unless they already are.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError: the tokenizer does not exist, or it is not on this machine and the Hub cannot be reached.
    """

    def __init__(self, name: str, added_tokens: Sequence[str] = ()) -> None:
        self._tokenizer = load_pretrained_tokenizer(name, added_tokens)
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self.end: int | None = self._tokenizer.eos_token_id
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        content = json.dumps(vocabulary, sort_keys=True) if backend is None else backend.to_str()
        libraries = [import_hf(library).__version__ for library in ("transformers", "tokenizers")]
        self.identity = [type(self._tokenizer).__name__, hashlib.sha256(content.encode()).hexdigest(), self.end]
        self.identity += libraries

    def encode(self, texts: list[tuple[str, bool]]) -> NDArray[Any]:
        """Return the tokens `(n,)` of the texts, with the end-of-text token after each document."""
        encoded = self._tokenizer(
            [text for text, _ in texts], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        end = [] if self.end is None else [self.end]
        parts = (
            (tokens, end if is_end else []) for tokens, (_, is_end) in zip(encoded["input_ids"], texts, strict=True)
        )
        return numpy.fromiter(chain.from_iterable(chain.from_iterable(parts)), self.dtype)


def load_tokenizer(name: str | None, added_tokens: Sequence[str] = ()) -> Tokenizer:
    """Return a `ByteTokenizer` for None, and an `HFTokenizer` for a name.

    Raises:
        ValueError: tokens are added to bytes, or are not different texts.
        ModuleNotFoundError, OSError: the tokenizer cannot be loaded, see `HFTokenizer`.
    """
    reason = "bytes have no other tokens; set tokenizer to a folder or a name on the Hub"
    refuse_if(name is None and bool(added_tokens), "added_tokens", added_tokens, reason)
    return ByteTokenizer() if name is None else HFTokenizer(name, added_tokens)


def load_pretrained_tokenizer(name: str, added_tokens: Sequence[str] = ()) -> Any:
    """Return a transformers tokenizer, given a folder or a name on the Hub, with further tokens at its end.

    Raises:
        ValueError: the further tokens are not different texts.
        ModuleNotFoundError: transformers is not installed.
        OSError: the tokenizer does not exist, or it is not on this machine and the Hub cannot be reached.
    """
    texts = [text for text in added_tokens if isinstance(text, str) and text.strip()]
    fits = not isinstance(added_tokens, str) and len({*texts}) == len(added_tokens)
    refuse_if(not fits, "added_tokens", added_tokens, "must be a list of different texts, such as ['<tool>']")
    tokenizer = _load_pretrained(name)
    tokenizer.add_tokens(texts)
    return tokenizer


def _load_pretrained(name: str) -> Any:
    prepare_import("transformers")  # whose configs may import torchvision
    load = import_hf("transformers").AutoTokenizer.from_pretrained
    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            return load(
                name, trust_remote_code=False, local_files_only=True
            )  # use a downloaded tokenizer without asking the Hub
        except (OSError, ValueError):
            pass
    try:
        return load(str(folder) if folder.is_dir() else name, trust_remote_code=False)
    except Exception as error:  # of many kinds: from the folder's files, the Hub or missing libraries
        reason = str(error).strip().partition("\n")[0].rstrip(".:")
        raise OSError(
            f"tokenizer={name!r}: transformers cannot load it ({reason}); give a folder that save_pretrained wrote, or "
            "a name on the Hub, which needs a network connection once"
        ) from error
