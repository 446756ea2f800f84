"""The base of transformers models whose evaluations and predictions can also generate texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runner.failures.errors import wrong_argument
from runner.models.hf.network import HFNetwork
from runner.models.model import Model

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric

    from runner.models.hf.generation import Generator, Texts


class WritingModel(Model, ABC):
    """A model whose evaluations and predictions generate texts if `generate_with` has been called with options.

    A text is generated when a metric of texts, a prediction or a callback needs it, once per batch, in the type of the
    weights.
    """

    module: Any

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: str | None = None
        self._generator: Generator | None = None
        self._texts: tuple[Any, Texts] | None = None

    @property
    def generates(self) -> bool:
        """Whether its evaluations and predictions generate texts."""
        return self._generator is not None

    def generate_with(self, module: Any, options: Mapping[str, Any] | None, tokenizer: str | None) -> None:
        """Generate in evaluations and predictions, unless `options` is None; see `runner.models.hf.generation`."""
        self.tokenizer = tokenizer
        if options is None:
            return
        if not isinstance(module, HFNetwork):
            raise wrong_argument("generation", dict(options), "needs a module that is an HFNetwork or HFCausalLM")
        from runner.models.hf.generation import Generator

        self._generator = Generator(module, options, tokenizer)

    @property
    def generation_config(self) -> dict[str, Any] | None:
        """Arguments with which transformers' `generate` writes such texts, if any; it samples with its own streams."""
        return None if self._generator is None else self._generator.arguments

    @abstractmethod
    def rows(self, batch: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the tokens, mask and labels of a batch, as `Generator` takes them."""

    def texts(self, batch: Any) -> Texts:
        """Return the inputs, references and generated texts of a batch. In evaluation mode."""
        assert self._generator is not None
        if self._texts is None or self._texts[0] is not batch:
            self._texts = (batch, self._generator(self.module, *self.rows(batch)))
        return self._texts[1]

    def with_text_metrics(self, metrics: Mapping[str, Metric], train: bool) -> Mapping[str, Metric]:
        """Return the metrics, plus those of generated texts for an evaluation of a model that generates."""
        if train or not self.generates:
            return metrics
        from runner.models.hf.text_scores import text_metrics

        return {**metrics, **text_metrics()}

    def update_text_metric(self, batch: Any, metric: Metric) -> bool:
        """Update a metric of texts with the texts of a batch, and return whether it is such a metric."""
        if not self.generates:
            return False
        from runner.models.hf.text_scores import takes_texts, update_with_texts

        if not takes_texts(metric):
            return False
        texts = self.texts(batch)
        update_with_texts(metric, texts.generated, texts.references)
        return True

    def text_columns(self, batch: Any) -> dict[str, Any]:
        """Return `input`, `reference` and `generated`, each a list with a text for each sample."""
        texts = self.texts(batch)
        return {"input": texts.inputs, "reference": texts.references, "generated": texts.generated}
