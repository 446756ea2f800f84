"""Language models of transformers with random weights, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_random_model(config: Any, folder: Path, seed: int = 1, **options: Any) -> Path:
    """Save a model of the config in a folder with the options of `save_pretrained`, and return the folder."""
    transformers: Any = pytest.importorskip("transformers")
    auto_class = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    auto_class.from_config(config).save_pretrained(folder, **options)
    transformers.utils.logging.enable_progress_bar()
    return folder
