from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple

import pytest
import torch
from tiny_runs import tiny_trainer
from torch import nn

from runner import ClassificationModel
from runner.callbacks import InMemoryLogger, TextExamples
from runner.data import TensorLoader


class Texts(NamedTuple):
    inputs: list[str]
    references: list[str]
    generated: list[str]


class Writer(ClassificationModel):
    """Generates a text with the number of each sample."""

    generates = True

    def texts(self, batch: Any) -> Texts:
        numbers = [f"{float(number):.0f}" for number in batch[0][:, 0]]
        return Texts(numbers, [f"reference {number}" for number in numbers], [f"text {number}" for number in numbers])


def train(model: ClassificationModel, callback: TextExamples) -> list[list[Any]]:
    data = torch.arange(12.0)[:, None].expand(12, 2).contiguous(), torch.arange(12) % 2
    logger = InMemoryLogger()
    with tiny_trainer(
        callback,
        model=model,
        train_dataloader=TensorLoader(*data, batch_size=4, shuffle=True),
        eval_dataloader=TensorLoader(*data, batch_size=3, shuffle=False),
        loggers=[logger],
        max_duration="2ep",
    ) as trainer:
        trainer.fit()
    return logger.tables["texts/eval"]["rows"] if logger.tables else []


def test_the_first_texts_of_each_evaluation_are_logged_in_one_table() -> None:
    rows = train(Writer(nn.Linear(2, 2), num_classes=2), TextExamples(num_texts=4))
    expected = [[batch, str(n), f"reference {n}", f"text {n}"] for batch in (3, 6) for n in range(4)]
    assert [list(row) for row in rows] == expected


def test_a_model_that_generates_no_texts_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        assert train(ClassificationModel(nn.Linear(2, 2), num_classes=2), TextExamples()) == []
    assert "text_examples does nothing: the model generates no texts; set model.generation" in caplog.text


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("num_texts=0: must be a number of texts")):
        TextExamples(num_texts=0)
