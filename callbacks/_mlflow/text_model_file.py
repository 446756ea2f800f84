"""Writes a trained transformers model with its tokenizer, from which the writer process makes an MLflow model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.callbacks._mlflow.spool import TEXT_MODEL
from runner.data.content import digest
from runner.libraries.hugging_face import import_hf

if TYPE_CHECKING:
    from runner import State

TASKS = ("sequence_classification", "causal_lm", "seq2seq_lm")
DEFAULT_NEW_TOKENS = 64  # for a model without `generation`
CLASS_COLUMNS = [["label", "string"], ["score", "double"], ["probabilities", "map"]]
LONGEST = 512  # tokens in a text, if neither the data nor the model has a limit


def has_texts(state: State) -> bool:
    """Return whether the model is a transformers model with a tokenizer, and maps texts to classes or texts."""
    from runner.models.hf.writing import WritingModel

    model: Any = state.unwrapped_model
    if not isinstance(model, WritingModel) or model.tokenizer is None:
        return False
    config = getattr(model.module, "config", None)
    is_multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    return getattr(model.module, "task", None) in TASKS and not is_multi_label


def write_text_model(state: State, folder: Path) -> dict[str, Any]:
    """Write the weights, config, tokenizer and `serving.json` into a new folder, and return their spool entry.

    Before the call, put the model into evaluation mode with the weights to log.
    """
    from runner.models.hf.loading import quiet_transformers

    model: Any = state.unwrapped_model
    module = copy.deepcopy(model.module).cpu()
    network = module.network.merge_and_unload() if module.base is not module.network else module.network
    tokenizer = import_hf("transformers").AutoTokenizer.from_pretrained(model.tokenizer)
    dataset = getattr(state.train_dataloader, "dataset", None)
    task = module.task
    if (classes := getattr(dataset, "classes", None)) and task == TASKS[0]:
        network.config.id2label = dict(enumerate(map(str, classes)))
        network.config.label2id = {str(name): number for number, name in enumerate(classes)}
    limits = [
        getattr(dataset, "context", None),
        getattr(module, "context", None),
        tokenizer.model_max_length,
        getattr(network.config, "max_position_embeddings", None),
    ]
    longest = min([limit for limit in limits if limit and limit < 1 << 24] or [LONGEST])
    outputs = CLASS_COLUMNS
    if task != TASKS[0]:
        config = model.generation_config
        network.generation_config.update(**(config or {"max_new_tokens": DEFAULT_NEW_TOKENS, "do_sample": False}))
        if task == "causal_lm":
            positions = min([limit for limit in limits[1:] if limit and limit < 1 << 24] or [LONGEST])
            longest = max(1, min(longest, positions - network.generation_config.max_new_tokens))
        outputs = [["generated", "string"]]
    elif network.config.num_labels == 1 or network.config.problem_type == "regression":
        outputs = [["value", "double"]]
    columns = [*(getattr(dataset, "inputs", None) or ["text"])]
    folder = folder / TEXT_MODEL
    with quiet_transformers():
        network.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
    (folder / "serving.json").write_text(json.dumps({"task": task, "columns": columns, "longest": longest}))
    versions = {name: import_hf(name).__version__ for name in ("transformers", "safetensors")}
    weights = digest([*network.state_dict().values()])
    return {"digest": weights, "columns": columns, "results": outputs, "versions": versions}
