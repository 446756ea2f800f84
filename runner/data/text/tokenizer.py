"""From texts to tokens: bytes, or a tokenizer of Hugging Face."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from runner.libraries.hugging_face import import_hf

BATCH_CHARACTERS = 1 << 20  # of texts that are tokenized together, in parallel
BATCH_TEXTS = 1000
BYTES_PER_TOKEN = 4  # a guess, for what has not been tokenized yet


class Tokenizer(ABC):
    """Turns texts into tokens.

    Attributes:
        vocab_size: size of the vocabulary: the largest token plus one.
        identity: all that the tokens of a text depend on, made of what JSON can hold.
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
        """Return the tokens `(n,)` of texts, one after another.

        Args:
            texts: each with a flag for the end of a document, where the end-of-text token is added if the tokenizer has
                one.
        """

    def encode_all(self, texts: Iterable[tuple[str, bool]]) -> Iterator[NDArray[Any]]:
        """Yield the tokens of any number of texts, a batch of texts at a time; for the arguments see `encode`."""
        batch: list[tuple[str, bool]] = []
        size = 0
        for one in texts:
            batch.append(one)
            size += len(one[0])
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_TEXTS:
                yield self.encode(batch)
                batch = []
                size = 0
        if batch:
            yield self.encode(batch)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8; nothing marks the end of a document."""

    vocab_size = 256
    identity = "bytes"

    def encode(self, texts: list[tuple[str, bool]]) -> NDArray[Any]:
        """Return the bytes `(n,)` of the texts."""
        return numpy.frombuffer("".join(text for text, _ in texts).encode(), numpy.uint8)


class HFTokenizer(Tokenizer):
    """A tokenizer of transformers. It adds no tokens for chats or for the start and end of sentences.

    Args:
        name: a folder, or a name on the Hub, such as gpt2.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError: the tokenizer does not exist, or it is not on this machine and the Hub cannot be reached.
    """

    def __init__(self, name: str) -> None:
        self._tokenizer = load_pretrained_tokenizer(name)
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self.end: int | None = self._tokenizer.eos_token_id
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        content = json.dumps(vocabulary, sort_keys=True) if backend is None else backend.to_str()
        libraries = [import_hf(one).__version__ for one in ("transformers", "tokenizers")]
        self.identity = [type(self._tokenizer).__name__, hashlib.sha256(content.encode()).hexdigest(), self.end]
        self.identity += libraries

    def encode(self, texts: list[tuple[str, bool]]) -> NDArray[Any]:
        """Return the tokens `(n,)` of the texts, the end-of-text token after each that ends a document."""
        encoded = self._tokenizer(
            [text for text, _ in texts], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        end = [] if self.end is None else [self.end]
        parts = ((tokens, end if ends else []) for tokens, (_, ends) in zip(encoded["input_ids"], texts, strict=True))
        return numpy.fromiter(chain.from_iterable(chain.from_iterable(parts)), self.dtype)


def load_tokenizer(name: str | None) -> Tokenizer:
    """Return the tokenizer of a name: None means bytes, any other name goes to `HFTokenizer`.

    Raises:
        ModuleNotFoundError, OSError: the tokenizer cannot be loaded, see `HFTokenizer`.
    """
    return ByteTokenizer() if name is None else HFTokenizer(name)


def load_pretrained_tokenizer(name: str) -> Any:
    """Return a tokenizer of transformers, from a folder or by its name on the Hub.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError: the tokenizer does not exist, or it is not on this machine and the Hub cannot be reached.
    """
    load = import_hf("transformers").AutoTokenizer.from_pretrained
    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            return load(name, trust_remote_code=False, local_files_only=True)  # what was downloaded is used as it is
        except (OSError, ValueError):
            pass
    try:
        return load(str(folder) if folder.is_dir() else name, trust_remote_code=False)
    except Exception as error:  # of many kinds: what a folder holds, what the Hub says, what is not installed
        reason = str(error).strip().partition("\n")[0].rstrip(".:")
        raise OSError(
            f"tokenizer={name!r}: transformers cannot load it ({reason}); give a folder that save_pretrained wrote, or "
            "a name on the Hub, which needs a network connection once"
        ) from error
