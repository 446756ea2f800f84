"""A tokenizer of a few hundred tokens, trained on the spot: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. Überall ist Öl.\n" * 40
END = "<|endoftext|>"


def make_tokenizer(folder: Path, vocab_size: int = 300, end: str | None = END) -> str:
    """The path of a folder with a byte-level BPE, as `save_pretrained` writes it."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [END] if end else []
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": vocab_size, "special_tokens": special, "initial_alphabet": alphabet}
    bpe.train_from_iterator([TEXT], trainers.BpeTrainer(show_progress=False, **options))
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end).save_pretrained(folder)
    return str(folder)
