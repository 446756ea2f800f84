"""Save trained models of transformers in its own format, so that `from_pretrained` loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.checkpoints.files import MODEL_CONFIG, find_checkpoint, read_file
from runner.checkpoints.weights import describe_differences, differences
from runner.failures.errors import wrong_argument
from runner.models.hf.causal_lm import HFCausalLM
from runner.models.hf.loading import quiet_transformers
from runner.models.hf.network import HFNetwork
from runner.models.hf.tasks import name_labels

KINDS = {f"{kind.__module__}.{kind.__name__}": kind for kind in (HFNetwork, HFCausalLM)}


def save_pretrained(run: str | Path, folder: str | Path, tokenizer: str | None = None) -> Path:
    """Write a trained model for transformers' `from_pretrained`, and return its folder.

    The weights are those that the run's evaluations used (with an averaging algorithm, the average), in float32.
    Adapters are merged into the weights that they adapt. From a shell:
    `python -c "from runner.models.hf.saving import save_pretrained as s; s('RUN', 'FOLDER')"`.

    Args:
        run: the folder of a run, whose last checkpoint is saved, or of a checkpoint; the model has an `HFNetwork`.
        folder: the folder to write, new or empty.
        tokenizer: a model, on the Hub or in a folder, whose tokenizer is saved there too; None saves none.

    Raises:
        FileExistsError: the folder is not empty.
        FileNotFoundError: there is no checkpoint, or the model's config is no longer at the name that the run used.
        ValueError: the run's model has no HFNetwork, or an algorithm has changed its layers.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise wrong_argument("folder", str(folder), "already exists; give a new or an empty folder", FileExistsError)
    checkpoint = find_checkpoint(run)
    config = json.loads((checkpoint / MODEL_CONFIG).read_text()) if (checkpoint / MODEL_CONFIG).is_file() else {}
    options: dict[str, Any] = dict(config.get("model", {}).get("module") or {})
    kind = KINDS.get(options.pop("_target_", ""))
    if kind is None:
        reason = "its model is neither model=hf_model nor model=hf_causal_lm, so transformers could not load it"
        raise wrong_argument("run", str(run), reason)
    model = kind(**{**options, "pretrained": False})
    saved = read_file(checkpoint, "model.pt").items()
    weights = {key.removeprefix("module."): weight for key, weight in saved if not key.startswith("reference.")}
    if wrong := differences(weights, model):
        reason = (
            f"some of its weights do not belong to transformers' model ({describe_differences(wrong)}): an algorithm "
            "has changed its layers, and transformers could not load them"
        )
        raise wrong_argument("run", str(run), reason)
    model.load_state_dict(weights)
    described = config.get("model", {})
    if described.get("multi_label"):
        model.config.problem_type = "multi_label_classification"
    if described.get("classes"):
        name_labels(model.config, described["classes"])
    with quiet_transformers():
        if tokenizer is not None:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(str(folder))
        network: Any = model.network
        merged = network.merge_and_unload() if model.base is not network else network
        merged.save_pretrained(str(folder))
    return folder
