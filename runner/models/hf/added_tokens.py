"""Embeddings for tokens that are added to the tokenizer of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.data.text.tokenizer import load_pretrained_tokenizer
from runner.failures.checks import refuse_if
from runner.models.by_name import is_making_by_name


def add_embeddings(network: Any, name: str, added_tokens: Sequence[str], lora: Mapping[str, Any] | None) -> Any:
    """Add rows for new tokens to the embeddings and the head, and return LoRA arguments that train these rows.

    The rows are initialized like those of a new model, unless the model already has unused rows.

    Args:
        network: a transformers model.
        name: the folder, or the name on the Hub, of its tokenizer.
        added_tokens: the tokens.
        lora: arguments of peft's `LoraConfig`; None trains all rows.

    Raises:
        OSError: the model has no tokenizer.
        ValueError: the tokens are not distinct strings, or `lora` already sets `trainable_token_indices`.
    """
    reason = "not with init_weights=by_name: the embeddings have no values yet; set in_order"
    refuse_if(is_making_by_name(), "added_tokens", added_tokens, reason)
    token_ids = load_pretrained_tokenizer(name, added_tokens).convert_tokens_to_ids([*added_tokens])
    if max(token_ids) >= network.get_input_embeddings().num_embeddings:
        network.resize_token_embeddings(max(token_ids) + 1, mean_resizing=False)
    if lora is None:
        return None
    reason = "added_tokens sets it; leave it out"
    refuse_if("trainable_token_indices" in lora, "lora", dict(lora), f"trainable_token_indices: {reason}")
    layers = (network.get_input_embeddings(), network.get_output_embeddings())
    names = {id(module): path.rpartition(".")[2] for path, module in network.named_modules()}
    is_tied = layers[1] is None or layers[1].weight is layers[0].weight  # peft then ties the new rows too
    trained = layers[:1] if is_tied else layers
    return {**lora, "trainable_token_indices": {names[id(layer)]: token_ids for layer in trained}}
