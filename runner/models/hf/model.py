"""Train any model of transformers, which computes the loss itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from runner.models.hf.tasks import default_metrics, is_multi_label, is_regression, task_of
from runner.models.language import IGNORED_TARGET
from runner.models.model import Model
from runner.models.supervised import check_metrics, update_checked

if TYPE_CHECKING:
    from torchmetrics import Metric


class HFModel(Model):
    """Any model of transformers that computes its own loss, from batches that are mappings with `labels`.

    The loss of tokens is a mean over the labels that are not -100, and every other loss a mean over samples.
    Algorithms that change targets or the loss function, such as label smoothing, cannot be used, because transformers'
    model computes the loss itself.

    Args:
        module: an `HFNetwork`, or a model of transformers.
        metrics: torchmetrics by name. None is bits per token for language models, the mean squared error for
            regression, else accuracy. Metrics see logits and labels; those of tokens are flattened to `(N * T, C)` and
            `(N * T,)`, so that the metric may need `ignore_index=-100`.

    Raises:
        TypeError: an entry of `metrics` is of the wrong kind.
    """

    def __init__(self, module: nn.Module, metrics: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.module = module
        self.task = task_of(getattr(module, "network", module))
        self._templates = None if metrics is None else check_metrics(metrics)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the tensors that the model of transformers returns: `logits` and, if there are labels, `loss`.

        Raises:
            TypeError: the batch is not a mapping.
        """
        if not isinstance(batch, Mapping):
            needed = (
                "a mapping, such as {'input_ids': ..., 'labels': ...}, which data=hf_dataset makes with a tokenizer"
            )
            raise TypeError(f"a batch of type {type(batch).__name__}: {type(self).__name__} needs {needed}")
        labels = batch.get("labels")
        if labels is not None and self._needs_float_labels():
            batch = {**batch, "labels": labels.float()}
        outputs = self.module(**batch)
        return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}

    def loss(self, outputs: dict[str, Tensor], batch: Any) -> Tensor:
        """Return the loss that the model of transformers has computed.

        Raises:
            ValueError: the model computed none, because the batch has no labels.
        """
        if "loss" not in outputs:
            held = ", ".join(map(repr, batch))
            raise ValueError(f"the model computed no loss: the batch has no 'labels', only {held}")
        return outputs["loss"]

    def metrics(self, train: bool) -> Mapping[str, Metric]:
        """Return new copies of the metrics, or the default ones of the task."""
        if self._templates is None:
            return default_metrics(self.task, self.module.config, train)
        return copy.deepcopy(self._templates)

    def update_metric(self, batch: Any, outputs: dict[str, Tensor], metric: Metric) -> None:
        """Update one metric with the logits and labels of a batch.

        Raises:
            ValueError: the metric does not fit them.
        """
        logits = outputs["logits"]
        labels = batch["labels"]
        if self._are_token_labels(labels):
            logits, labels = self._align(logits, labels)
            logits = logits.reshape(-1, logits.shape[-1])
            labels = labels.reshape(-1)
        elif logits.shape == (*labels.shape, 1):
            logits = logits.squeeze(-1)
        update_checked(metric, logits, [labels], {})

    def predictions(self, batch: Any, outputs: dict[str, Tensor]) -> dict[str, Any]:
        """Return `prediction`, the class probabilities of each sequence, and `target` if the batch has labels.

        The prediction is the most probable class or token; for regression it is the estimated number, and with several
        labels per sample it holds a truth value for each.
        """
        if self.task is None:
            return super().predictions(batch, outputs)
        logits = outputs["logits"].float()
        targets = {"target": batch["labels"]} if "labels" in batch else {}
        if self.task == "sequence_classification" and is_regression(self.module.config):
            return {**targets, "prediction": logits.squeeze(-1)}
        if self.task == "sequence_classification" and is_multi_label(self.module.config):
            return {**targets, "prediction": logits > 0, "probabilities": logits.sigmoid()}
        probabilities = {"probabilities": logits.softmax(-1)} if logits.ndim == 2 else {}
        return {**targets, "prediction": logits.argmax(-1), **probabilities}

    def loss_weight(self, batch: Any) -> int | Tensor:
        """Return the number of labels that are not -100, for a loss of tokens; otherwise the number of samples."""
        labels = batch.get("labels")
        if not self._are_token_labels(labels):
            return self.num_samples(batch)
        return (self._align(labels, labels)[1] != IGNORED_TARGET).sum()

    def without_targets(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch without labels, as inference sees it."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def _needs_float_labels(self) -> bool:
        config = self.module.config
        return self.task == "sequence_classification" and (is_regression(config) or is_multi_label(config))

    def _are_token_labels(self, labels: Any) -> bool:
        return isinstance(labels, Tensor) and self.task not in (None, "sequence_classification")

    def _align(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and the labels that they predict: those of the next token in a causal model."""
        return (logits[:, :-1], labels[:, 1:]) if self.task == "causal_lm" else (logits, labels)
