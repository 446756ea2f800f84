"""Turn columns of texts into tokens with labels: batches for transformers models, for each of their tasks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from runner.data.hf.columns import NO_VALUE, Columns, holds_texts, is_text
from runner.data.new_rows import KEY, table_at
from runner.data.text.packing import IGNORED
from runner.data.text.tokenizer import load_pretrained_tokenizer
from runner.failures.checks import check_one_of, refuse_if
from runner.failures.errors import WrongKey, wrong_argument
from runner.libraries.hugging_face import import_hf

TASKS = ("sequence_classification", "token_classification", "masked_lm", "causal_lm", "seq2seq_lm")
NAMED = TASKS[:2]
"""The tasks whose targets may be names of classes."""
UNLABELED = ("masked_lm", "causal_lm")
"""The tasks whose labels are the tokens of the inputs themselves."""


class Texts(Dataset[dict[str, Tensor]]):
    """The rows of a data set as samples for a transformers model, which `stack` makes into batches.

    Args:
        rows: a `datasets.Dataset`.
        inputs: the column of texts, or two columns whose texts form a pair.
        targets: the column of targets; None: the task has no targets.
        encode: makes tokens and labels of a row.
        labels: the targets of the same rows as tensors, if each text has a class or numbers; otherwise None.

    Attributes:
        inputs: the columns of texts.
        context: maximum number of tokens in a sample.

    Raises:
        ValueError: a row has no text or no target.
    """

    def __init__(
        self, rows: Any, inputs: Sequence[str], targets: str | None, encode: Encoder, labels: Columns | None
    ) -> None:
        for key, column in _named_columns(inputs, targets):
            if missing := rows.data.column(column).null_count:
                kind = "text" if key == "inputs" else "target"
                reason = f"{missing} of {len(rows.data)} rows have no {kind} in this column"
                raise wrong_argument(key, column, f"{reason}; fill them in, or leave them out")
        self.rows = rows.select_columns([*dict.fromkeys((*inputs, *([targets] if targets else [])))])
        self.inputs = tuple(inputs)
        self._targets = targets
        self._encode = encode
        self.context = encode.context
        self._labels = labels
        self.ids: list[str] | None = None  # of new rows
        self.is_multi_label = labels is not None and labels.is_multi_label

    def read_from(self, rows: Any) -> None:
        """Take samples from other rows by number, such as a dict of the rows of a batch."""
        self.rows = rows
        if self._labels is not None:
            self._labels.read_from(rows)

    def check_labels(self, number: int | None) -> None:
        """Check class numbers, as `Columns.check_labels` does."""
        if self._labels is not None:
            self._labels.check_labels(number)

    def new_rows(self, path: Path) -> Texts:
        """Return the rows of a file, without targets; the attribute `ids` has their ids."""
        if self._encode.task not in NAMED:
            raise WrongKey(KEY, f"a model for {self._encode.task} predicts no classes or numbers", repr(str(path)))
        new = copy.copy(self)
        new._targets = new._labels = None
        new.rows, new.ids = table_at(path, self.inputs, self.rows.features)
        return new

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, in order; None if the data has none."""
        return self._encode.classes if self._labels is None else self._labels.classes

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def targets(self) -> Tensor:
        """The targets of all rows, `(rows, ...)`; empty unless each text has a class or numbers."""
        return torch.empty(0) if self._labels is None else self._labels.targets

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        for key, column in _named_columns(self.inputs, self._targets):  # a stream's values are not checked yet
            refuse_if(
                row[column] is None,
                key,
                column,
                f"row {index} {NO_VALUE}",
            )
        target = row[self._targets] if self._targets else None
        if self._labels is not None:
            target = self._labels[index][0]
        try:
            return self._encode([row[column] for column in self.inputs], target)
        except LookupError as error:
            reason = f"row {index} has {error.args[0]}"
            raise wrong_argument("targets", self._targets, reason) from error

    def stack(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return a batch: the tokenizer's outputs, `(N, T)`, and `labels`, `(N, ...)`.

        T is the length of the longest sample of this batch on this rank.
        """
        labels = [sample["labels"] for sample in samples if "labels" in sample]
        inputs = [{name: value for name, value in sample.items() if name != "labels"} for sample in samples]
        if not labels:  # new rows
            return self._encode.pad(inputs)
        if self._labels is not None:
            (stacked,) = self._labels.stack([(label,) for label in labels])
            return {**self._encode.pad(inputs), "labels": stacked}
        return {**self._encode.pad(inputs), "labels": self._encode.pad_labels(labels)}


class Encoder:
    """Makes samples for one task with a transformers tokenizer, and pads them.

    Args:
        tokenizer: a folder, or a name on the Hub.
        context: maximum number of tokens in a sample; longer samples are cut, in a pair the longer text first.
        task: one of `TASKS`.
        classes: class names in order, for 'token_classification'; None if the targets are numbers.

    Attributes:
        context, task, classes: the arguments.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError: the tokenizer does not exist.
        ValueError: the tokenizer lacks a padding token, or the mask token or word indices that the task needs.
    """

    def __init__(
        self,
        tokenizer: str,
        context: int,
        task: str = TASKS[0],
        classes: Sequence[str] | None = None,
        added_tokens: Sequence[str] = (),
    ) -> None:
        self._tokenizer = load_pretrained_tokenizer(tokenizer, added_tokens)
        # Silence its advice to tokenize whole batches: masks would then depend on the number of ranks.
        self._tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
        self.context = context
        self.task = task
        self.classes = None if classes is None else [*classes]
        self._numbers = None if classes is None else {name: number for number, name in enumerate(classes)}
        remedy = "in Python and save it with save_pretrained, or choose another tokenizer"
        reason = f"has no padding token, which batches of texts need; set its pad_token {remedy}"
        refuse_if(self._tokenizer.pad_token_id is None, "tokenizer", tokenizer, reason)
        if task == "masked_lm":
            reason = f"has no mask token, which task='masked_lm' needs; set its mask_token {remedy}"
            refuse_if(self._tokenizer.mask_token_id is None, "tokenizer", tokenizer, reason)
            collator = import_hf("transformers").DataCollatorForLanguageModeling
            self._draw_masks = collator(self._tokenizer).torch_mask_tokens
        if task == "token_classification" and not self._tokenizer.is_fast:
            reason = "cannot map tokens to words, which task='token_classification' needs"
            raise wrong_argument("tokenizer", tokenizer, f"{reason}; choose a fast one")

    def __call__(self, texts: Sequence[Any], target: Any) -> dict[str, Tensor]:
        """Return `input_ids` and further outputs of the tokenizer, each `(T,)`, and `labels`.

        Args:
            texts: one text, or the two texts of a pair; for 'token_classification' one list of words.
            target: the label, a tensor; for 'seq2seq_lm' a text; for 'token_classification' a class for each word;
                None for new rows, which get no labels.

        Raises:
            LookupError: for 'token_classification', words and classes differ in number, or a class is unknown.
        """
        encoding = self._tokenizer(
            *texts,
            truncation=True,
            max_length=self.context,
            is_split_into_words=self.task == "token_classification",
            return_special_tokens_mask=self.task == "masked_lm",
        )
        sample = {name: torch.tensor(values) for name, values in encoding.items()}
        if self.task == "masked_lm":
            self._mask_tokens(sample)
        elif self.task == "causal_lm":
            sample["labels"] = sample["input_ids"].clone()
        elif self.task == "seq2seq_lm":
            tokens = self._tokenizer(text_target=target, truncation=True, max_length=self.context)
            sample["labels"] = torch.tensor(tokens["input_ids"])
        elif self.task == "token_classification" and target is not None:
            sample["labels"] = self._labels_of_words(texts[0], target, encoding.word_ids())
        elif target is not None:
            sample["labels"] = target
        return sample

    def pad(self, inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return samples without their labels as a batch `(N, T)`."""
        return dict(self._tokenizer.pad(inputs, return_tensors="pt"))

    def pad_labels(self, labels: Sequence[Tensor]) -> Tensor:
        """Return labels of tokens as a batch `(N, T)`, with -100 at the padding."""
        side = self._tokenizer.padding_side
        return pad_sequence([*labels], batch_first=True, padding_value=IGNORED, padding_side=side)

    def fake(self, num_texts: int, make_labels: Callable[[int], Tensor] | int) -> Callable[[int], dict[str, Tensor]]:
        """Return a function `make(n)` of batches of n samples of maximum length, with the largest token and labels.

        Args:
            num_texts: number of texts in a sample, 1 or 2.
            make_labels: `make_labels(n)` returns the labels of n samples; or the largest class of a token.
        """
        example = self._tokenizer(*["a"] * num_texts)
        values = {name: max(row) for name, row in example.items()}
        values["input_ids"] = max(self._tokenizer.get_vocab().values(), default=0)
        largest = make_labels if isinstance(make_labels, int) else 0
        if self.task in (*UNLABELED, "seq2seq_lm"):
            largest = values["input_ids"]

        def make(samples: int) -> dict[str, Tensor]:
            batch = {name: torch.full((samples, self.context), value) for name, value in values.items()}
            labels = torch.full((samples, self.context), largest) if isinstance(make_labels, int) else None
            return {**batch, "labels": make_labels(samples) if labels is None else labels}  # type: ignore[operator]

        return make

    def _mask_tokens(self, sample: dict[str, Tensor]) -> None:
        """Mask some tokens of a sample as BERT does, and make them its labels: at least one if any token can be masked.

        The choice is drawn from torch's generator, which the loader seeds for each sample and epoch.
        """
        tokens = sample["input_ids"]
        special = sample.pop("special_tokens_mask").bool()
        inputs, labels = (batch[0] for batch in self._draw_masks(tokens[None].clone(), special[None]))
        if (labels == IGNORED).all() and not special.all():  # the mean over no labels would be NaN
            candidates = (~special).nonzero()
            position = candidates[torch.randint(len(candidates), ())]
            inputs[position] = self._tokenizer.mask_token_id
            labels[position] = tokens[position]
        sample["input_ids"] = inputs
        sample["labels"] = labels

    def _labels_of_words(self, words: Sequence[str], classes: Sequence[Any], word_ids: Sequence[int | None]) -> Tensor:
        """Return labels `(T,)`: the class of each word at its first token, and -100 at all other tokens."""
        if len(words) != len(classes):
            raise LookupError(f"{len(classes)} classes for {len(words)} words; give each word one")
        labels = torch.full((len(word_ids),), IGNORED)
        last_word = None
        for position, word in enumerate(word_ids):
            if word is not None and word != last_word:
                labels[position] = classes[word] if self._numbers is None else self._numbers[classes[word]]
            last_word = word
        return labels


def check_task(
    task: str | None,
    inputs: Sequence[str],
    targets: str | Sequence[str] | None,
    classes: Sequence[str] | None,
    tokenizer: str | None,
) -> str:
    """Check that the other arguments fit the task, and return the task.

    Raises:
        ValueError: the task is unknown, targets are missing or unusable, there are too many inputs, or no tokenizer.
    """
    task = TASKS[0] if task is None else task
    check_one_of("task", task, TASKS)
    is_list = targets is not None and not isinstance(targets, str)
    refuse_if(is_list and task != TASKS[0], "targets", targets, f"task={task!r} takes one column; give one")
    if task in UNLABELED:
        reason = f"task={task!r} predicts tokens of the inputs; leave targets out"
        refuse_if(targets is not None, "targets", targets, reason)
    else:
        refuse_if(targets is None, "targets", None, f"task={task!r} needs a column of targets besides inputs")
    refuse_if(task not in NAMED and classes is not None, "classes", classes, f"task={task!r} has none; leave it out")
    if len(inputs) > 1 and task == "causal_lm":
        remedy = f"for prompts and answers take data=chat data.prompt={inputs[0]} data.response={inputs[1]}"
        reason = f"task={task!r} would train on both texts; give one column, or {remedy}"
        raise wrong_argument("inputs", [*inputs], reason)
    has_single = task in ("token_classification", "seq2seq_lm")
    refuse_if(len(inputs) > 1 and has_single, "inputs", [*inputs], f"task={task!r} takes one column; give one")
    reason = f"task={task!r} needs a folder, or a name on the Hub: that of the model"
    refuse_if(task != TASKS[0] and tokenizer is None, "tokenizer", None, reason)
    return task


def _named_columns(inputs: Sequence[str], targets: str | Sequence[str] | None) -> list[tuple[str, str]]:
    """Return each column with the name of its argument, for messages."""
    return [*(("inputs", column) for column in inputs), *([("targets", str(targets))] if targets else [])]


def check_columns(
    features: Mapping[str, Any], task: str, inputs: Sequence[str], targets: str | Sequence[str] | None
) -> None:
    """Raise ValueError if the columns do not fit a task other than sequence classification."""
    has_words = task == "token_classification"
    kind = "lists of words" if has_words else "texts"
    for key, column in _named_columns(inputs, targets):
        refuse_if(column not in features, key, column, f"no such column; the columns are {', '.join(features)}")
        feature = features[column]
        fits = holds_texts(feature) if has_words else is_text(feature)
        if has_words and key == "targets":
            kind = "lists of classes"
            fits = hasattr(feature, "feature")
        refuse_if(not fits, key, column, f"task={task!r} needs a column of {kind}; this one holds {feature}")


def text_columns(features: Mapping[str, Any], inputs: Sequence[str], tokenizer: str | None) -> bool:
    """Return whether the columns of the argument `inputs` hold texts.

    Raises:
        ValueError: a column does not exist, one of two columns holds no texts, or the tokenizer is missing for texts or
            given for other columns.
    """
    for column in inputs:
        refuse_if(column not in features, "inputs", column, f"no such column; the columns are {', '.join(features)}")
    texts = [column for column in inputs if is_text(features[column])]
    if len(inputs) > 1 and len(texts) < len(inputs):
        other = next(column for column in inputs if column not in texts)
        reason = f"two columns must both hold texts, but {other!r} holds {features[other]}; give one column"
        raise wrong_argument("inputs", list(inputs), reason)
    reason = "this column holds texts; set tokenizer=<a folder, or a name on the Hub> to the model's tokenizer"
    refuse_if(texts and tokenizer is None, "inputs", inputs[0], reason)
    reason = f"inputs={inputs[0]!r} holds {features[inputs[0]]}, not texts; leave tokenizer out"
    refuse_if(tokenizer is not None and not texts, "tokenizer", tokenizer, reason)
    return bool(texts)
