"""Columns of texts as batches of tokens, and names of classes as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import END, make_tokenizer

from runner.data.hf.dataset import load_hf_dataset
from runner.data.hf.texts import BatchEncoder

SIZES = {"batch_size": 4, "eval_batch_size": 3, "num_workers": 0, "cache": None}
ROWS = [("fox", "lazy dog", "b"), ("the quick brown fox", "dog", "a"), ("dog", "the fox", "c"), ("fox", "Öl", "b")]


def load(**options: Any) -> tuple[Any, Any]:
    return load_hf_dataset(**{**SIZES, **options})


def fake(**options: Any) -> tuple[Any, Any]:
    return vars(load_hf_dataset)["fake"](**{**SIZES, **options})


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A csv file of two texts and a class each, and a tokenizer with a padding token."""
    datasets: Any = pytest.importorskip("datasets")
    transformers: Any = pytest.importorskip("transformers")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.chdir(tmp_path)
    lines = [f"{one},{other},{label},{number}" for number, (one, other, label) in enumerate(ROWS * 3)]
    Path("rows.csv").write_text("\n".join(["one,other,label,number", *lines]) + "\n")
    name = make_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = END
    tokenizer.save_pretrained(name)
    files = {"name": "csv", "data_files": "rows.csv", "eval_split": "train", "targets": "label"}
    return {**files, "tokenizer": name, "context": 6}


@pytest.mark.parametrize("inputs", ["one", ["one", "other"]])
def test_a_batch_holds_what_the_tokenizer_makes_of_its_texts(pairs: dict[str, Any], inputs: str | list[str]):
    outside: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(pairs["tokenizer"])
    _, evaluation = load(**pairs, inputs=inputs)
    assert len(evaluation) == 4
    for number, batch in enumerate(evaluation):
        rows = [(ROWS * 3)[index] for index in range(3 * number, 3 * number + 3)]
        columns = [[row[column] for row in rows] for column in range(1 if isinstance(inputs, str) else 2)]
        theirs = outside(*columns, truncation=True, max_length=6, padding=True, return_tensors="pt")
        assert batch.keys() == {*theirs, "labels"}
        assert all(torch.equal(batch[name], one) for name, one in theirs.items())
        assert batch["labels"].tolist() == ["abc".index(row[2]) for row in rows]


def test_each_batch_is_padded_to_its_own_longest_sample(pairs: dict[str, Any]):
    _, evaluation = load(**{**pairs, "context": 64}, inputs="one")
    lengths = {int(batch["attention_mask"].sum(1).max()) == batch["input_ids"].shape[1] for batch in evaluation}
    assert lengths == {True} and len({batch["input_ids"].shape[1] for batch in evaluation}) > 1


@pytest.mark.parametrize("targets", ["label", "number"])
def test_made_up_batches_look_like_the_longest_real_ones(pairs: dict[str, Any], targets: str):
    options = {**pairs, "inputs": ["one", "other"], "targets": targets}
    made_up = next(iter(fake(**options)[0]))
    real = next(iter(load(**options)[0]))
    assert {name: (one.shape, one.dtype) for name, one in made_up.items()} == {
        name: (one.shape, one.dtype) for name, one in real.items()
    }
    assert targets == "number" or int(made_up["labels"].max()) == 2


def test_classes_keep_the_order_they_are_given_in(pairs: dict[str, Any]):
    _, evaluation = load(**pairs, inputs="one", classes=["z", "c", "b", "a"])
    assert [int(one) for batch in evaluation for one in batch["labels"]] == [2, 3, 1, 2] * 3


def test_names_of_classes_for_other_inputs(pairs: dict[str, Any]):
    _, evaluation = load(**{**pairs, "tokenizer": None}, inputs="number")
    inputs, targets = next(iter(evaluation))
    assert inputs.tolist() == [0, 1, 2] and targets.tolist() == [1, 0, 2]


@pytest.mark.parametrize("ranks", [2])
def test_all_ranks_number_classes_alike(pairs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ranks: int):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    found = []
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        _, evaluation = load(**{**pairs, "eval_batch_size": 4}, inputs="one")
        found.append([batch["labels"].tolist() for batch in evaluation])
    assert [[*one, *other] for one, other in zip(*found, strict=True)] == [[1, 0, 2, 1]] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": "one", "tokenizer": None}, "inputs='one': this column holds texts; give tokenizer="),
        ({"inputs": "number"}, "inputs='number' holds Value('int64'), not texts; leave tokenizer out"),
        ({"inputs": ["one", "number"]}, "two columns must both hold texts, but 'number' holds"),
        ({"inputs": ["one", "other", "label"]}, "must be one column, or two columns of texts"),
        ({"inputs": ["one", "x"]}, "inputs='x': there is no such column; there are one, other, label, number"),
        ({"inputs": "one", "classes": ["a", "b"]}, "classes=['a', 'b']: the column 'label' also has 'c'; add it"),
        ({"inputs": "one", "targets": "number", "classes": ["a"]}, "classes=['a']: is for targets that are texts"),
        ({"inputs": "one", "targets": "gone"}, "targets='gone': there is no such column"),
    ],
)
@pytest.mark.parametrize("how", [load, fake])
def test_what_is_wrong_is_one_sentence(pairs: dict[str, Any], how: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        how(**{**pairs, **options})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_rows_without_text_or_class(pairs: dict[str, Any]):
    Path("rows.csv").write_text("one,label\nfox,a\n,b\ndog,\n")
    with pytest.raises(ValueError, match="inputs='one': 1 of 2 rows have no text in this column"):
        load(**{**pairs, "eval_split": "train[:2]"}, inputs="one", split="train[:2]")
    with pytest.raises(ValueError, match="targets='label': some rows have no value"):
        load(**pairs, inputs="one")


def test_a_tokenizer_without_padding(tmp_path: Path):
    with pytest.raises(ValueError, match="has no padding token, which batches of texts need; set its pad_token"):
        BatchEncoder(make_tokenizer(tmp_path), 8)
