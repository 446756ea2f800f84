"""A frozen base model in four bits (QLoRA), with the library bitsandbytes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from runner.distributed.ranks import get_local_rank
from runner.failures.checks import check_one_of, refuse_if
from runner.libraries.hugging_face import import_hf
from runner.models.by_name import is_making_by_name

QUANTIZATIONS = ("nf4", "fp4")


def check_quantization(quantization: str | None, trains_adapters: bool) -> None:
    """Check that the base model can be quantized on this machine.

    Raises:
        ValueError: there is no such quantization, all weights would train, or bitsandbytes does not work here.
    """
    if quantization is None:
        return
    check_one_of("quantization", quantization, QUANTIZATIONS)
    reason = "only adapters of a pretrained model train on quantized weights; give lora too, or leave quantization out"
    refuse_if(not trains_adapters, "quantization", quantization, reason)
    # On a CPU, bitsandbytes changes frozen weights.
    works = find_spec("bitsandbytes") is not None and torch.cuda.is_available()
    reason = "needs CUDA and the library bitsandbytes (pip install bitsandbytes); leave quantization out here"
    refuse_if(not works, "quantization", quantization, reason)
    reason = "not with init_weights=by_name: quantized weights cannot be sharded"
    refuse_if(is_making_by_name(), "quantization", quantization, reason)


def quantization_options(quantization: str | None) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantize weights, as in QLoRA (Dettmers et al. 2023).

    As in the paper, scales are quantized too, and layers compute in bfloat16.
    """
    if quantization is None:
        return {}
    config = import_hf("transformers").BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config, "device_map": {"": f"cuda:{get_local_rank()}"}}
