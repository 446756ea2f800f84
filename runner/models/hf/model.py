"""Train any transformers model that computes its own loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from runner.failures.checks import refuse_if
from runner.files.values import HubName, KernelOptions
from runner.models.class_losses import class_loss
from runner.models.classification import check_names
from runner.models.hf.network import HFNetwork
from runner.models.hf.tasks import default_metrics, is_classifier, is_multi_label, is_regression, name_labels, task_of
from runner.models.hf.writing import WritingModel
from runner.models.language import IGNORED_TARGET
from runner.models.supervised import check_metrics, update_checked
from runner.models.target_mean import TargetMean, read_loss

if TYPE_CHECKING:
    from torchmetrics import Metric


class HFModel(WritingModel):
    """Any transformers model that computes its own loss, from batches that are mappings with `labels`.

    The loss of tokens is a mean over the labels that are not -100, and every other loss a mean over samples; with
    class weights, over the weights of the labels.
    Algorithms that change targets or the loss function, such as label smoothing, cannot be used, because the
    transformers model computes the loss itself. Only for a classifier with an argument that changes the loss,
    `class_loss` computes it.

    Args:
        module: an `HFNetwork`, or a transformers model.
        metrics: torchmetrics by name. None is bits per token for language models, the mean squared error for
            regression, else accuracy. Metrics see logits and labels; those of tokens are flattened to `(N * T, C)` and
            `(N * T,)`, so that the metric may need `ignore_index=-100`. With `generation`, those of
            `torchmetrics.text` see generated texts and references; None also adds ExactMatch, ROUGE and BLEU.
        class_weights, label_smoothing, loss, gamma, classes: for classifiers; see `ClassificationModel`.
        multi_label: whether a sequence may have any number of classes.
        generation: options of `runner.models.hf.generation.Generator`, such as `{'max_new_tokens': 64}`, for
            evaluations and predictions of 'causal_lm' and 'seq2seq_lm'; None generates nothing.
        tokenizer: tokenizer of the generated texts, a folder or a name on the Hub.

    Attributes:
        class_names: the names of the classes, in order; None if they are unknown.

    Raises:
        TypeError: an entry of `metrics` is of the wrong kind.
        ValueError: an argument is out of range, the model is not a classifier, or an option of generation is wrong.
    """

    def __init__(
        self,
        module: nn.Module,
        metrics: Mapping[str, Any] | None = None,
        class_weights: Sequence[float] | str | None = None,
        label_smoothing: float = 0.0,
        loss: str = "cross_entropy",
        gamma: float = 2.0,
        multi_label: bool = False,
        classes: Sequence[str] | None = None,
        generation: KernelOptions | None = None,
        tokenizer: HubName | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.task = module.task if isinstance(module, HFNetwork) else task_of(module)
        self._templates = None if metrics is None else check_metrics(metrics)
        other = "is a task of model=hf_segmentation; this model is for the other tasks"
        refuse_if(self.task == "semantic_segmentation", "task", self.task, other)
        reason = f"is for task='sequence_classification', but this is a model for {self.task}"
        refuse_if(multi_label and self.task != "sequence_classification", "multi_label", multi_label, reason)
        config: Any = module.config
        if multi_label:
            config.problem_type = "multi_label_classification"
        self.multi_label = is_multi_label(self.task, config)
        changes = {"class_weights": class_weights, "label_smoothing": label_smoothing or None}
        changes["loss"] = None if loss == "cross_entropy" else loss
        reason = f"is for models that classify sequences or tokens, but this is a model for {self.task}"
        for name, value in {**changes, "classes": classes}.items():
            refuse_if(value is not None and not is_classifier(self.task, config), name, value, reason)
        self.loss_fn: Any = None
        if is_classifier(self.task, config):
            described = class_loss(config.num_labels, loss, gamma, class_weights, label_smoothing, self.multi_label)
            self.loss_fn = described if any(changes.values()) else None
        mean = read_loss(self.loss_fn)
        self._mean = mean if isinstance(mean, TargetMean) else None
        self.class_names: list[str] | None = None
        if classes is not None:
            self.name_classes(check_names(classes, config.num_labels))
        self.generate_with(module, generation, tokenizer)

    def name_classes(self, names: Sequence[str]) -> None:
        """Set the names of the classes, also in the config of the model, which `save_pretrained` writes."""
        self.class_names = [*names]
        name_labels(self.module.config, names)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the tensors that the transformers model returns: `logits` and, if there are labels, `loss`.

        Raises:
            TypeError: the batch is not a mapping.
        """
        if not isinstance(batch, Mapping):
            needed = (
                "a mapping, such as {'input_ids': ..., 'labels': ...}, which data=hf_dataset makes with a tokenizer"
            )
            raise TypeError(f"a batch of type {type(batch).__name__}: {type(self).__name__} needs {needed}")
        config = self.module.config
        labels = batch.get("labels")
        if labels is None and self.task == "seq2seq_lm" and self.generates:
            return {}  # without labels the decoder has no input, and the texts are generated later
        if labels is not None and (is_regression(self.task, config) or is_multi_label(self.task, config)):
            batch = {**batch, "labels": labels.float()}
        if self.loss_fn is not None:
            batch = self.without_targets(batch)
        outputs = self.module(**batch)
        return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}

    def loss(self, outputs: dict[str, Tensor], batch: Any) -> Tensor:
        """Return the loss that the transformers model has computed, or that of `class_loss`.

        Raises:
            ValueError: there is none, because the batch has no labels.
        """
        if self.loss_fn is not None and "labels" in batch:
            logits, labels = outputs["logits"], batch["labels"]
            if self._are_token_labels(labels):
                logits = logits.transpose(1, 2)
            return (self._mean or self.loss_fn)(logits, labels)
        if "loss" not in outputs:
            held = ", ".join(map(repr, batch))
            raise ValueError(f"the model computed no loss: the batch has no 'labels', only {held}")
        return outputs["loss"]

    def metrics(self, train: bool) -> Mapping[str, Metric]:
        """Return new copies of the metrics, or the default ones of the task."""
        if self._templates is None:
            return self.with_text_metrics(default_metrics(self.task, self.module.config, train), train)
        metrics = copy.deepcopy(self._templates)
        if train and self.generates:
            from runner.models.hf.text_scores import takes_texts

            return {name: metric for name, metric in metrics.items() if not takes_texts(metric)}
        return metrics

    def rows(self, batch: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the tokens, mask and labels of a batch."""
        return batch["input_ids"], batch.get("attention_mask"), batch.get("labels")

    def update_metric(self, batch: Any, outputs: dict[str, Tensor], metric: Metric) -> None:
        """Update one metric with the logits and labels of a batch.

        Raises:
            ValueError: the metric does not fit them.
        """
        if self.update_text_metric(batch, metric):
            return
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
        labels per sample it holds a truth value for each. A model that generates returns texts instead: `input`,
        `reference` and `generated`.
        """
        if self.generates:
            return self.text_columns(batch)
        if self.task is None:
            return super().predictions(batch, outputs)
        logits = outputs["logits"].float()
        targets = {"target": batch["labels"]} if "labels" in batch else {}
        if is_regression(self.task, self.module.config):
            return {**targets, "prediction": logits.squeeze(-1)}
        if is_multi_label(self.task, self.module.config):
            return {**targets, "prediction": logits > 0, "probabilities": logits.sigmoid()}
        probabilities = {"probabilities": logits.softmax(-1)} if logits.ndim == 2 else {}
        return {**targets, "prediction": logits.argmax(-1), **probabilities}

    def loss_weight(self, batch: Any) -> int | Tensor:
        """Return the number of labels that are not -100, for a loss of tokens; otherwise the number of samples.

        With class weights it is the sum of the weights of the labels.
        """
        labels = batch.get("labels")
        if self._mean is not None and labels is not None:
            return self._mean.weight_of(labels)
        if labels is None or not self._are_token_labels(labels):
            return self.num_samples(batch)
        return (self._align(labels, labels)[1] != IGNORED_TARGET).sum()

    def without_targets(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch without labels, as inference sees it."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def _are_token_labels(self, labels: Any) -> bool:
        return isinstance(labels, Tensor) and self.task not in (None, "sequence_classification")

    def _align(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and the labels that they predict: those of the next token in a causal model."""
        return (logits[:, :-1], labels[:, 1:]) if self.task == "causal_lm" else (logits, labels)
