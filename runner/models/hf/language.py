"""A transformers language model for windows of tokens, which can also generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.files.values import HubName, KernelOptions
from runner.models.hf.writing import WritingModel
from runner.models.language import IGNORED_TARGET, LanguageModel

if TYPE_CHECKING:
    from torchmetrics import Metric


class HFLanguageModel(LanguageModel, WritingModel):
    """A `LanguageModel` from transformers, whose evaluations and predictions can generate texts.

    Args:
        module: an `HFCausalLM`.
        metric_name: see `LanguageModel`.
        generation: options of `runner.models.hf.generation.Generator`, such as `{'max_new_tokens': 64, 'prompt_tokens':
            32}`; None generates nothing.
        tokenizer: tokenizer of the texts, a folder or a name on the Hub.

    Raises:
        ValueError: an option of generation is wrong.
    """

    def __init__(
        self,
        module: nn.Module,
        metric_name: str = "BitsPerToken",
        generation: KernelOptions | None = None,
        tokenizer: HubName | None = None,
    ) -> None:
        super().__init__(module, metric_name)
        self.generate_with(module, generation, tokenizer)

    def metrics(self, train: bool) -> Mapping[str, Metric]:
        """Return the metrics of a language model, and those of generated texts."""
        return self.with_text_metrics(super().metrics(train), train)

    def rows(self, batch: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the windows with their last target, and the targets at their own tokens.

        Raises:
            ValueError: rows hold several documents.
        """
        if len(batch) > 2:
            raise ValueError("generation: rows hold several documents, which have no prompt; set pack_documents=false")
        inputs, targets = batch
        last = targets[:, -1:]
        tokens = torch.cat([inputs, last.clamp(min=0)], 1)
        mask = torch.cat([torch.ones_like(inputs), last != IGNORED_TARGET], 1)
        return tokens, mask, torch.cat([torch.full_like(last, IGNORED_TARGET), targets], 1)

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        """Update one metric: a metric of texts with the generated ones, any other with the logits."""
        if not self.update_text_metric(batch, metric):
            super().update_metric(batch, outputs, metric)

    def predictions(self, batch: Any, outputs: Tensor) -> dict[str, Any]:
        """Return texts if the model generates: `input`, `reference` and `generated`; else see `LanguageModel`."""
        return self.text_columns(batch) if self.generates else super().predictions(batch, outputs)
