"""Adds low-rank adapters (LoRA) to transformers models, with Hugging Face's peft."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from runner.checkpoints.base import Base, digest_of, parameter_of
from runner.distributed.ranks import get_local_rank
from runner.failures.checks import check_keys
from runner.failures.errors import wrong_argument
from runner.libraries.hugging_face import import_hf
from runner.models.hf.tasks import TASKS


def add_adapters(network: Any, task: str, lora: Mapping[str, Any]) -> Any:
    """Wrap a transformers model in a peft model, which trains only the adapters and a new classifier.

    The network is changed in place. `lora` holds arguments of peft's `LoraConfig`.

    Raises:
        ModuleNotFoundError: peft is not installed.
        ValueError: peft does not know an argument, or refuses its value.
    """
    peft = import_hf("peft")
    known = sorted({field.name for field in fields(peft.LoraConfig) if field.init} - {"task_type", "inference_mode"})
    check_keys("lora", lora, known, "peft's LoraConfig")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what peft handles itself, and of old names in transformers
            return peft.get_peft_model(network, peft.LoraConfig(task_type=TASKS[task].peft_type, **lora))
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise wrong_argument("lora", dict(lora), f"peft refuses it: {reason}") from error


def base_of(network: Any, name: str, revision: str | None, lora: Mapping[str, Any]) -> Base | None:
    """Return the base of a pretrained network, with the names of its weights; None if adapters will change the weights.

    Weights that the task adds are not part of the base, because they are initialized at random.
    """
    if lora.get("init_lora_weights", True) not in (None, True, False, "gaussian"):
        return None  # PiSSA, OLoRA and others subtract the new adapters from the weights
    new = getattr(network, "new_weights", ())  # missing on the meta device
    weights = {key: weight for key, weight in network.named_parameters() if key not in new}
    # One rank of each machine hashes, because files may differ between machines. If its base differs, all ranks end.
    is_hashed = get_local_rank() == 0 and not any(weight.is_meta for weight in weights.values())
    scales = {key: value for key, value in network.state_dict().items() if parameter_of(key) != key}
    digest = digest_of({**weights, **scales}) if is_hashed else ""
    return Base(name, revision, digest, {*weights})


def leave_out(module: Any, base: Base, ids: set[int]) -> None:
    """Make a module's checkpoints leave out those parameters of a base that peft has frozen.

    `ids` holds the `id()` of each parameter of the base, because peft changes their names.
    """
    parameters = module.named_parameters()
    base.weights = {key for key, weight in parameters if id(weight) in ids and not weight.requires_grad}
    module.checkpoint_base = base
