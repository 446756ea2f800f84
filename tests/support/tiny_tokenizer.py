"""A tokenizer of a few hundred tokens, trained when a test needs it, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. Überall ist Öl.\n" * 40
END = "<|endoftext|>"
CHATML = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""A chat template that does not mark the assistant's answers."""
MARKING = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}\n"
    "{% endfor %}"
)
"""A chat template that renders the same text, and marks the assistant's answers."""


def make_tokenizer(folder: Path, vocab_size: int = 300, end: str | None = END, template: str | None = None) -> str:
    """Train a byte-level BPE tokenizer, save it in a folder with `save_pretrained`, and return the folder's path."""
    transformers: Any = pytest.importorskip("transformers")
    modules = ("decoders", "models", "pre_tokenizers", "trainers")
    decoders, models, pre_tokenizers, trainers = (pytest.importorskip(f"tokenizers.{module}") for module in modules)
    bpe: Any = pytest.importorskip("tokenizers").Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [*([END] if end else []), *(["<|start|>", "<|end|>"] if template else [])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": vocab_size, "special_tokens": special, "initial_alphabet": alphabet}
    bpe.train_from_iterator([TEXT], trainers.BpeTrainer(show_progress=False, **options))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)
