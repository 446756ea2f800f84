"""One or two columns of texts as tokens, with a column of targets: batches for models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.hf.columns import Columns, is_text
from runner.data.text.tokenizer import load_pretrained_tokenizer
from runner.failures import wrong_argument

Sample = tuple[tuple[str, ...], Tensor]


class Texts(Dataset[Sample]):
    """The rows of a data set as texts with their target; `stack` makes tokens of a batch of them.

    Args:
        rows: a `datasets.Dataset`.
        inputs: the column of texts, or the two columns whose texts form a pair.
        targets: the targets of the same rows.
        encode: makes tokens of texts.

    Raises:
        ValueError: a row has no text.
    """

    def __init__(self, rows: Any, inputs: Sequence[str], targets: Columns, encode: BatchEncoder) -> None:
        for column in inputs:
            if missing := rows.data.column(column).null_count:
                reason = (
                    f"{missing} of {len(rows.data)} rows have no text in this column; fill them in, or leave them out"
                )
                raise wrong_argument("inputs", column, reason)
        self._rows = rows.select_columns([*dict.fromkeys(inputs)])
        self._inputs = tuple(inputs)
        self._targets = targets
        self._encode = encode

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        return tuple(row[column] for column in self._inputs), self._targets[index][0]

    def stack(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return a batch: what the tokenizer returns, `(N, T)`, and `labels`, `(N, ...)`.

        T is the length of the longest sample of this batch on this rank.
        """
        texts, targets = zip(*samples, strict=True)
        (labels,) = self._targets.stack([(one,) for one in targets])
        return {**self._encode(texts), "labels": labels}


class BatchEncoder:
    """Turns texts, or pairs of them, into batches with a tokenizer of transformers.

    Args:
        tokenizer: a folder, or a name on the Hub.
        context: the most tokens of a sample; longer ones are cut, of a pair the longer text first.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError: the tokenizer does not exist.
        ValueError: the tokenizer has no padding token.
    """

    def __init__(self, tokenizer: str, context: int) -> None:
        self._tokenizer = load_pretrained_tokenizer(tokenizer)
        self._context = context
        if self._tokenizer.pad_token_id is None:
            remedy = "set its pad_token in Python and save it with save_pretrained, or choose another tokenizer"
            raise wrong_argument("tokenizer", tokenizer, f"has no padding token, which batches of texts need; {remedy}")

    def __call__(self, texts: Sequence[tuple[str, ...]]) -> dict[str, Tensor]:
        """Return `input_ids`, `attention_mask` and what else the tokenizer makes, each `(N, T)`, padded."""
        columns = [list(one) for one in zip(*texts, strict=True)]
        options = {"truncation": True, "max_length": self._context, "padding": True, "return_tensors": "pt"}
        return dict(self._tokenizer(*columns, **options))

    def fake(self, num_texts: int, make_labels: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
        """Return `make(n)` -> a batch of n samples of the greatest length, with the largest token and labels.

        Args:
            num_texts: the number of texts in a sample, 1 or 2.
            make_labels: `make_labels(n)` returns the labels of n samples.
        """
        example = self([("a",) * num_texts])
        values = {name: int(one.max()) for name, one in example.items()}
        values["input_ids"] = max(self._tokenizer.get_vocab().values(), default=0)

        def make(samples: int) -> dict[str, Tensor]:
            tokens = {name: torch.full((samples, self._context), value) for name, value in values.items()}
            return {**tokens, "labels": make_labels(samples)}

        return make


def text_columns(features: Mapping[str, Any], inputs: Sequence[str], tokenizer: str | None) -> bool:
    """Return whether columns, chosen by the argument `inputs`, hold texts.

    Raises:
        ValueError: a column does not exist, several are given that do not all hold texts, or the tokenizer is missing
            for texts or given for something else.
    """
    for column in inputs:
        if column not in features:
            raise wrong_argument("inputs", column, f"there is no such column; there are {', '.join(features)}")
    holding = [column for column in inputs if is_text(features[column])]
    if len(inputs) > 1 and len(holding) < len(inputs):
        other = next(one for one in inputs if one not in holding)
        reason = f"two columns must both hold texts, but {other!r} holds {features[other]}; give one column"
        raise wrong_argument("inputs", list(inputs), reason)
    if holding and tokenizer is None:
        reason = "this column holds texts; give tokenizer=<a folder, or a name on the Hub>, that of the model"
        raise wrong_argument("inputs", holding[0], reason)
    if tokenizer is not None and not holding:
        reason = f"inputs={inputs[0]!r} holds {features[inputs[0]]}, not texts; leave tokenizer out"
        raise wrong_argument("tokenizer", tokenizer, reason)
    return bool(holding)
