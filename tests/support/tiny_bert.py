"""A small BERT with random weights and a vocabulary of a few words, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.libraries.targets import prepare_import

WORDS = ["the", "film", "was", "plot", "actors", "story", "very", "good", "great", "lovely", "bad", "awful", "boring"]
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "vocab_size": 5 + len(WORDS),
}


def make_bert(folder: Path) -> Path:
    """Save the model and its tokenizer in a folder, and return the folder."""
    transformers: Any = pytest.importorskip("transformers")
    prepare_import("transformers")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(folder)
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    return folder
