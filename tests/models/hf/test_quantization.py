"""Quantized base models are refused without CUDA, and the settings for transformers are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoints.base import parameter_of
from runner.models.hf.quantization import quantization_options

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("peft")
ADAPTERS = "model.module.lora={r: 2}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="quantization may work with CUDA")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([ADAPTERS, "model.module.quantization=nf4"], "quantization='nf4': needs CUDA and the library bitsandbytes"),
        (["model.module.quantization=nf4"], "quantization='nf4': only adapters of a pretrained model train"),
        ([ADAPTERS, "model.module.quantization=4bit"], "quantization='4bit': must be"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "train"])
def test_impossible_quantization_has_an_error_of_one_line(run_here, verb: str, words: list[str], message: str):
    base = ["model=hf_causal_lm", "data=stdlib_text", "algorithms=none", "optimizer=adamw", "hydra.run.dir=run"]
    error = run_here(verb, *base, *words, code=2).err
    assert f"error: model.module.{message}" in error and error.count("\n") == 1
    assert not Path("run/checkpoints").exists()


def test_scales_in_a_checkpoint_are_attributed_to_the_quantized_weight():
    assert parameter_of("layer.weight.quant_state.bitsandbytes__nf4") == "layer.weight"
    names = ["layer.weight", "bias", "layer.lora_A.default.weight"]
    assert [*map(parameter_of, names)] == names


def test_options_request_four_bits_and_quantized_scales_on_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("LOCAL_RANK", "1")
    options = quantization_options("fp4")
    config = options["quantization_config"].to_dict()
    assert config["load_in_4bit"] and config["bnb_4bit_use_double_quant"] and config["bnb_4bit_quant_type"] == "fp4"
    assert config["bnb_4bit_compute_dtype"] == "bfloat16" and options["device_map"] == {"": "cuda:1"}
