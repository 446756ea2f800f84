"""Value embeddings: attention values also depend directly on the token itself, in layers of any depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate
from runner.failures.errors import wrong_argument
from runner.models import GPT
from runner.models.gpt import Attention


class ValueEmbedding(Algorithm):
    """Adds a learned vector of the token to the values of a GPT's attention, with one table (V, D) for each layer.

    The vectors start at zero, so that the model's outputs are unchanged at first. Works with the GPT of this project.
    Nothing is random or depends on ranks or microbatches.

    Args:
        layers: indices of the layers that get a table, counted from 0, or backwards from -1; None for all layers.
        allow_no_match: whether to leave any other model unchanged instead of raising an error.

    Raises:
        ValueError: `layers` is not a list of whole numbers; or, at INIT, the model is not such a GPT, or has no layer
            with one of these indices.

    Evidence:
        Some, in speed runs of small language models (Jordan et al. 2024, "modded-nanogpt"; compare Zhou et al. 2024,
        "Value Residual Learning", arXiv:2410.17897); none for large ones.
    """

    def __init__(self, layers: Sequence[int] | None = None, allow_no_match: bool = False) -> None:
        is_list = isinstance(layers, Sequence) and layers and all(type(layer) is int for layer in layers)
        if layers is not None and not is_list:
            raise wrong_argument("layers", layers, "must be a list of whole numbers, or null for all layers")
        self.layers = layers
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        sizes: dict[nn.Module, tuple[int, int]] = {}
        for gpt in (module for module in state.unwrapped_model.modules() if isinstance(module, GPT)):
            attentions = [module for module in gpt.blocks.modules() if isinstance(module, Attention)]
            for layer in range(len(attentions)) if self.layers is None else self.layers:
                if not -len(attentions) <= layer < len(attentions):
                    raise wrong_argument(
                        "layers", self.layers, f"the model has {len(attentions)} layers, no layer {layer}"
                    )
                sizes[attentions[layer]] = gpt.token_embedding.num_embeddings, gpt.d_model

        def extend(attention: nn.Module, index: int) -> nn.Module:
            assert isinstance(attention, Attention)
            attention.value_embedding = nn.Embedding.from_pretrained(torch.zeros(sizes[attention]), freeze=False)
            return attention

        operate(self, state, {sizes.__contains__: extend}, "runner.models.GPT", self.allow_no_match)
