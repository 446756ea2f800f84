"""Save trained transformers models in their own format, so that `from_pretrained` loads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.checkpoints.base import BASE, names_in_base
from runner.checkpoints.files import find_checkpoint, read_config, read_file
from runner.checkpoints.weights import describe_differences, differences
from runner.data.text.tokenizer import load_pretrained_tokenizer
from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.models.hf.causal_lm import HFCausalLM
from runner.models.hf.loading import quiet_transformers
from runner.models.hf.network import HFNetwork
from runner.models.hf.tasks import name_labels

KINDS = {f"{kind.__module__}.{kind.__name__}": kind for kind in (HFNetwork, HFCausalLM)}


def save_pretrained(
    run: str | Path,
    folder: str | Path,
    tokenizer: str | None = None,
    form: str = "merged",
    dtype: torch.dtype = torch.float32,
    base: str | None = None,
) -> Path:
    """Write a trained model for transformers' `from_pretrained`, and return its folder.

    The weights are those that the run's evaluations used (with an averaging algorithm, the average).
    From a shell: `runner export RUN FOLDER`.

    Args:
        run: the folder of a run, whose last checkpoint is saved, or of a checkpoint; the model has an `HFNetwork`.
        folder: the folder to write, new or empty.
        tokenizer: a model, on the Hub or in a folder, whose tokenizer is saved there too; None saves none.
        form: 'merged', in which adapters are merged into the weights that they adapt, or 'adapter', which writes them
            alone, for peft's `PeftModel.from_pretrained`.
        dtype: type of the saved weights.
        base: see `load_trained`.

    Raises:
        FileExistsError: the folder is not empty.
        FileNotFoundError: there is no checkpoint, or the model is no longer under the name that the run used.
        ValueError: the run's model has no HFNetwork, no adapters to write alone, or layers that an algorithm has
            changed.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise wrong_argument("folder", str(folder), "already exists; give a new or an empty folder", FileExistsError)
    model = load_trained(find_checkpoint(run), base)
    network: Any = model.network
    has_adapters = model.base is not network
    if form == "adapter" and not has_adapters:
        raise wrong_argument("form", form, "the run has trained no adapters (model.module.lora); give merged")
    reason = "four-bit weights have no exact sum with adapters; give adapter"
    refuse_if(form == "merged" and getattr(model.base, "is_quantized", False), "form", form, reason)
    aside = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        with quiet_transformers():
            if tokenizer is not None:
                load_pretrained_tokenizer(tokenizer, model.added_tokens).save_pretrained(str(aside))
            network = network.merge_and_unload() if has_adapters and form == "merged" else network
            options = {"save_embedding_layers": False} if form == "adapter" else {}  # rows of added tokens are saved
            network.to(dtype).save_pretrained(str(aside), **options)
        if folder.exists():
            folder.rmdir()
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def load_trained(checkpoint: Path, base: str | None = None) -> HFNetwork:
    """Return the network of a run with its trained weights.

    Args:
        checkpoint: an intact checkpoint.
        base: the name to read frozen weights from that the checkpoint lacks; None is the name in the run's config.

    Raises:
        FileNotFoundError: there is no model of that name.
        ValueError: the run's model has no HFNetwork, its base differs, or an algorithm has changed its layers.
    """
    described = (read_config(checkpoint) or {}).get("model", {})
    options: dict[str, Any] = dict(described.get("module") or {})
    kind = KINDS.get(options.pop("_target_", ""))
    if kind is None:
        reason = "its model is neither model=hf_model nor model=hf_causal_lm, so transformers could not load it"
        raise wrong_argument("run", str(checkpoint), reason)
    named = {} if base is None else {"name": base}
    model = kind(**{**options, **named, "pretrained": (checkpoint / BASE).is_file()})
    saved = read_file(checkpoint, "model.pt").items()
    weights = {key: weight for key, weight in saved if not key.startswith("reference.")}  # which DPO adds
    holder = nn.ModuleDict({"module": model})  # as in the run's model
    if wrong := differences(weights, holder, names_in_base(holder, weights, checkpoint)):
        reason = (
            f"some of its weights do not belong to transformers' model ({describe_differences(wrong)}): an algorithm "
            "has changed its layers, and transformers could not load them"
        )
        raise wrong_argument("run", str(checkpoint), reason)
    holder.load_state_dict(weights, strict=False)
    if described.get("multi_label"):
        model.config.problem_type = "multi_label_classification"
    if described.get("classes"):
        name_labels(model.config, described["classes"])
    return model
