"""Four-bit bases are refused on machines without CUDA; elsewhere transformers gets the right settings."""

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="four bits may work here")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([ADAPTERS, "model.module.quantization=nf4"], "quantization='nf4': needs CUDA and the library bitsandbytes"),
        (["model.module.quantization=nf4"], "quantization='nf4': only adapters of a pretrained model train"),
        ([ADAPTERS, "model.module.quantization=4bit"], "quantization='4bit': must be"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_base_that_cannot_be_quantized_is_refused_in_one_line(run_here, verb: str, words: list[str], reason: str):
    base = ["model=hf_causal_lm", "data=stdlib_text", "algorithms=none", "optimizer=adamw", "hydra.run.dir=run"]
    wrong = run_here(verb, *base, *words, code=2).err
    assert f"error: model.module.{reason}" in wrong and wrong.count("\n") == 1
    assert not Path("run/checkpoints").exists()


def test_scales_of_quantized_weights_belong_to_them():
    assert parameter_of("layer.weight.quant_state.bitsandbytes__nf4") == "layer.weight"
    assert [parameter_of(name) for name in ("layer.weight", "bias", "layer.lora_A.default.weight")] == [
        "layer.weight", "bias", "layer.lora_A.default.weight",
    ]  # fmt: skip


def test_transformers_is_asked_for_four_bits_with_quantized_scales_on_the_gpu_of_this_rank(
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("LOCAL_RANK", "1")
    options = quantization_options("fp4")
    config = options["quantization_config"].to_dict()
    assert config["load_in_4bit"] and config["bnb_4bit_use_double_quant"] and config["bnb_4bit_quant_type"] == "fp4"
    assert config["bnb_4bit_compute_dtype"] == "bfloat16" and options["device_map"] == {"": "cuda:1"}
