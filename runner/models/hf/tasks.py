"""The tasks for which transformers' models can be trained, and the default metrics of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from runner.libraries.hugging_face import import_hf
from runner.models.language import IGNORED_TARGET


class Task(NamedTuple):
    """The names of a task in transformers and peft.

    Attributes:
        auto_class: the class of transformers that makes the models.
        mapping: transformers' mapping from kinds of config to the models.
        peft_type: the `TaskType` in peft.
    """

    auto_class: str
    mapping: str
    peft_type: str


TASKS = {
    "causal_lm": Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "CAUSAL_LM"),
    "masked_lm": Task("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", "FEATURE_EXTRACTION"),
    "seq2seq_lm": Task("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "SEQ_2_SEQ_LM"),
    "sequence_classification": Task(
        "AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "SEQ_CLS"
    ),
    "token_classification": Task(
        "AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "TOKEN_CLS"
    ),
    "semantic_segmentation": Task(
        "AutoModelForSemanticSegmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", "FEATURE_EXTRACTION"
    ),
}
LANGUAGE = ("causal_lm", "masked_lm", "seq2seq_lm")


def task_of(network: Any) -> str | None:
    """Return the task of a transformers model, judging by its class; None for a task that is not among `TASKS`."""
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    transformers = import_hf("transformers")
    for name, task in TASKS.items():
        if type(base) is getattr(transformers, task.mapping).get(type(base.config), None):
            return name
    return None


def default_metrics(task: str | None, config: Any, train: bool) -> dict[str, Any]:
    """Return new metrics by name: bits per token for language models, mean squared error for regression, else accuracy.

    Args:
        task: the model's task; None gives no metrics.
        config: the model's config.
        train: whether the metrics are for training batches; language models have none, as the loss says the same.
    """
    from runner.libraries.torchmetrics import import_torchmetrics

    if task is None or (task in LANGUAGE and train):
        return {}
    if task in LANGUAGE:
        from runner.models.bits_per_token import BitsPerToken

        return {"BitsPerToken": BitsPerToken(ignore_index=IGNORED_TARGET)}
    classification = import_torchmetrics().classification
    labels = config.num_labels
    # Validating the arguments would read the targets back from the device at every batch.
    options = {"ignore_index": IGNORED_TARGET, "validate_args": False}
    if is_regression(task, config):
        return {"MeanSquaredError": import_torchmetrics().MeanSquaredError()}
    if is_multi_label(task, config):
        return {"MultilabelAccuracy": classification.MultilabelAccuracy(labels, validate_args=False)}
    return {"MulticlassAccuracy": classification.MulticlassAccuracy(labels, average="micro", **options)}


def is_regression(task: str | None, config: Any) -> bool:
    """Return whether a model predicts numbers for sequences."""
    return task == "sequence_classification" and (config.problem_type == "regression" or config.num_labels == 1)


def is_multi_label(task: str | None, config: Any) -> bool:
    """Return whether a model predicts a truth value for each class of a sequence."""
    return task == "sequence_classification" and config.problem_type == "multi_label_classification"


def is_classifier(task: str | None, config: Any) -> bool:
    """Return whether a model classifies sequences or tokens, into one class each or several."""
    return task in ("sequence_classification", "token_classification") and not is_regression(task, config)


def positions_of(config: Any) -> int | None:
    """Return the longest sequence, in tokens, that a language model takes; None if its config does not say."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def name_labels(config: Any, names: Sequence[str]) -> None:
    """Write the names of the classes, in order, into the config of a model."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
