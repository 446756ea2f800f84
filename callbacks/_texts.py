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


def check_tokenizer(tokenizer: Any) -> None:
    """Raise `ValueError` unless an object is a tokenizer or None."""
    if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise wrong_argument("tokenizer", tokenizer, "must have encode(text) and decode(tokens), or be None for bytes")
