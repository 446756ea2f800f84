"""A default tokenizer, and a check of users' tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.failures.errors import wrong_argument


class Bytes:
    """A tokenizer whose tokens are the bytes of the text."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; tokens above 255 become question marks."""
        return bytes(token if token < 256 else ord("?") for token in tokens).decode(errors="replace")


class Pretrained:
    """A transformers tokenizer, from a folder or the Hub; it adds no special tokens, and leaves them out of texts.

    Raises:
        ModuleNotFoundError, OSError: it cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        from runner.data.text.tokenizer import load_pretrained_tokenizer

        self._tokenizer = load_pretrained_tokenizer(name)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode([*tokens], skip_special_tokens=True)


def make_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer: one loaded by name, bytes for None, or the given object.

    Raises:
        ValueError: the object is not a tokenizer.
    """
    if isinstance(tokenizer, str):
        return Pretrained(tokenizer)
    check_tokenizer(tokenizer)
    return tokenizer or Bytes()


def check_tokenizer(tokenizer: Any) -> None:
    """Raise `ValueError` unless an object is a tokenizer or None."""
    if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise wrong_argument("tokenizer", tokenizer, "must have encode(text) and decode(tokens), or be None for bytes")
