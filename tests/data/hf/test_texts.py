"""Columns of texts become batches of tokens, and class names become numbers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import END, make_tokenizer

from runner.data.hf.dataset import load_hf_dataset
from runner.data.hf.texts import Encoder

SIZES = {"batch_size": 4, "eval_batch_size": 3, "num_workers": 0, "cache": None}
ROWS = [("fox", "lazy dog", "b"), ("the quick brown fox", "dog", "a"), ("dog", "the fox", "c"), ("fox", "Öl", "b")]


def load(**options: Any) -> Any:
    return load_hf_dataset(**{**SIZES, **options})


def fake(**options: Any) -> Any:
    return vars(load_hf_dataset)["fake"](**{**SIZES, **options})


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Write a csv file whose rows have two texts and a class, and a tokenizer with a padding token."""
    datasets: Any = pytest.importorskip("datasets")
    transformers: Any = pytest.importorskip("transformers")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.chdir(tmp_path)
    lines = [f"{first},{second},{label},{number}" for number, (first, second, label) in enumerate(ROWS * 3)]
    Path("rows.csv").write_text("\n".join(["first,second,label,number", *lines]) + "\n")
    name = make_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = END
    tokenizer.mask_token = "<mask>"
    tokenizer.save_pretrained(name)
    files = {"name": "csv", "data_files": "rows.csv", "eval_split": "train", "targets": "label"}
    return {**files, "tokenizer": name, "context": 6}


@pytest.mark.parametrize("inputs", ["first", ["first", "second"]])
def test_a_batch_equals_the_output_of_the_tokenizer(pairs: dict[str, Any], inputs: str | list[str]):
    reference: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(pairs["tokenizer"])
    _, evaluation = load(**pairs, inputs=inputs)
    assert len(evaluation) == 4
    for number, batch in enumerate(evaluation):
        rows = [(ROWS * 3)[index] for index in range(3 * number, 3 * number + 3)]
        columns = [[row[column] for row in rows] for column in range(1 if isinstance(inputs, str) else 2)]
        expected = reference(*columns, truncation=True, max_length=6, padding=True, return_tensors="pt")
        assert batch.keys() == {*expected, "labels"}
        assert all(torch.equal(batch[name], value) for name, value in expected.items())
        assert batch["labels"].tolist() == ["abc".index(row[2]) for row in rows]


def test_each_batch_is_padded_to_its_own_longest_sample(pairs: dict[str, Any]):
    _, evaluation = load(**{**pairs, "context": 64}, inputs="first")
    lengths = {int(batch["attention_mask"].sum(1).max()) == batch["input_ids"].shape[1] for batch in evaluation}
    assert lengths == {True} and len({batch["input_ids"].shape[1] for batch in evaluation}) > 1


@pytest.mark.parametrize("targets", ["label", "number"])
def test_fake_batches_have_the_shapes_of_the_longest_real_ones(pairs: dict[str, Any], targets: str):
    options = {**pairs, "inputs": ["first", "second"], "targets": targets}
    fake_batch = next(iter(fake(**options)[0]))
    real = next(iter(load(**options)[0]))
    assert {name: (value.shape, value.dtype) for name, value in fake_batch.items()} == {
        name: (value.shape, value.dtype) for name, value in real.items()
    }
    assert targets == "number" or int(fake_batch["labels"].max()) == 2


def test_classes_are_numbered_in_the_order_of_the_argument(pairs: dict[str, Any]):
    _, evaluation = load(**pairs, inputs="first", classes=["z", "c", "b", "a"])
    assert [int(label) for batch in evaluation for label in batch["labels"]] == [2, 3, 1, 2] * 3


def test_class_names_are_targets_of_numeric_inputs(pairs: dict[str, Any]):
    _, evaluation = load(**{**pairs, "tokenizer": None}, inputs="number")
    inputs, targets = next(iter(evaluation))
    assert inputs.tolist() == [0, 1, 2] and targets.tolist() == [1, 0, 2]


def test_all_ranks_number_classes_alike(pairs: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    labels = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        _, evaluation = load(**{**pairs, "eval_batch_size": 4}, inputs="first")
        labels.append([batch["labels"].tolist() for batch in evaluation])
    assert [[*first, *second] for first, second in zip(*labels, strict=True)] == [[1, 0, 2, 1]] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": "first", "tokenizer": None}, "inputs='first': this column holds texts; set tokenizer="),
        ({"inputs": "number"}, "inputs='number' holds Value('int64'), not texts; leave tokenizer out"),
        ({"inputs": ["first", "number"]}, "two columns must both hold texts, but 'number' holds"),
        ({"inputs": ["first", "second", "label"]}, "must be one column, or two columns of texts"),
        ({"inputs": ["first", "x"]}, "inputs='x': no such column; the columns are first, second, label, number"),
        (
            {"inputs": "first", "classes": ["a", "b"]},
            "classes=['a', 'b']: row 2 of split 'train' has 'c' in column 'label'; add it, or correct the row",
        ),
        ({"inputs": "first", "targets": "number", "classes": ["a"]}, "classes=['a']: is for targets that are texts"),
        ({"inputs": "first", "targets": "gone"}, "targets='gone': no such column"),
    ],
)
@pytest.mark.parametrize("function", [load, fake])
def test_a_wrong_argument_is_refused_in_one_line(
    pairs: dict[str, Any], function: Any, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError) as caught:
        function(**{**pairs, **options})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_rows_without_text_or_class_are_refused(pairs: dict[str, Any]):
    Path("rows.csv").write_text("first,label\nfox,a\n,b\ndog,\n")
    with pytest.raises(ValueError, match="inputs='first': 1 of 2 rows have no text in this column"):
        load(**{**pairs, "eval_split": "train[:2]"}, inputs="first", split="train[:2]")
    with pytest.raises(ValueError, match="targets='label': some rows have no value"):
        load(**pairs, inputs="first")


def test_a_tokenizer_without_padding_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="has no padding token, which batches of texts need; set its pad_token"):
        Encoder(make_tokenizer(tmp_path), 8)


WORDS = [["the", "quick", "fox"], ["lazy", "dogs", "sleep", "over"], ["Öl"]]
TAGS = [["O", "A", "N"], ["A", "N", "O", "O"], ["N"]]
TASKS: dict[str, dict[str, Any]] = {
    "token_classification": {"inputs": "words", "targets": "tags"},
    "masked_lm": {"inputs": "text", "targets": None},
    "causal_lm": {"inputs": "text", "targets": None},
    "seq2seq_lm": {"inputs": "text", "targets": "second"},
}


@pytest.fixture
def lists(pairs: dict[str, Any]) -> dict[str, Any]:
    """Write JSON lines with words, a class for each word, and two texts."""
    rows = [
        {"words": words, "tags": tags, "text": " ".join(words), "second": " ".join(reversed(words)), "n": 1}
        for words, tags in zip(WORDS * 4, TAGS * 4, strict=True)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**pairs, "name": "json", "data_files": "rows.jsonl", "context": 64, "targets": None}


def test_the_first_token_of_a_word_has_its_class(lists: dict[str, Any]):
    reference: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(lists["tokenizer"])
    _, evaluation = load(**lists | TASKS["token_classification"], task="token_classification")
    batch = next(iter(evaluation))
    expected = reference(WORDS, is_split_into_words=True, padding=True, return_tensors="pt")
    assert all(torch.equal(batch[name], value) for name, value in expected.items())
    for row, (labels, tags) in enumerate(zip(batch["labels"], TAGS, strict=True)):
        words = expected.word_ids(row)
        firsts = [index for index, word in enumerate(words) if word is not None and word not in words[:index]]
        assert labels[firsts].tolist() == ["ANO".index(tag) for tag in tags]
        assert (labels != -100).sum() == len(tags)


def test_masked_tokens_are_the_labels_and_do_not_depend_on_the_rank(
    lists: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    options = {**lists, **TASKS["masked_lm"], "task": "masked_lm", "eval_batch_size": 4}

    def count_samples(epoch: int = 0) -> Counter[tuple[int, ...]]:
        """Count how often each sample, without its padding, is trained on in an epoch."""
        loader = load(**options)[0]
        loader.seek(epoch, 0)
        counts: Counter[tuple[int, ...]] = Counter()
        for batch in loader:
            for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
                is_token = mask.bool()
                assert (labels[~is_token] == -100).all() and (labels != -100).any()
                counts[(*ids[is_token].tolist(), -1, *labels[is_token].tolist())] += 1
        return counts

    expected = count_samples()
    assert count_samples() == expected != count_samples(epoch=1)
    counts_of_ranks = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        counts_of_ranks.append(count_samples())
    assert counts_of_ranks[0] + counts_of_ranks[1] == expected


def test_labels_of_language_models_are_tokens(lists: dict[str, Any]):
    reference: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(lists["tokenizer"])
    (batch, *_) = load(**lists | TASKS["causal_lm"], task="causal_lm")[1]
    is_token = batch["attention_mask"].bool()
    assert torch.equal(batch["labels"][is_token], batch["input_ids"][is_token])
    assert (batch["labels"][~is_token] == -100).all()
    (batch, *_) = load(**lists | TASKS["seq2seq_lm"], task="seq2seq_lm")[1]
    for labels, words in zip(batch["labels"], WORDS, strict=True):
        assert labels[labels != -100].tolist() == reference(" ".join(reversed(words)))["input_ids"]


@pytest.mark.parametrize("task", TASKS)
def test_fake_batches_of_each_task_have_the_names_and_types_of_real_ones(lists: dict[str, Any], task: str):
    options = {**lists, **TASKS[task], "task": task, "test_split": "train[:5]"}
    for loader, fake_loader in zip(load(**options), fake(**options), strict=True):
        assert len(loader) == len(fake_loader)
        real, made_up = next(iter(loader)), next(iter(fake_loader))
        types = {name: value.dtype for name, value in real.items()}
        assert types == {name: value.dtype for name, value in made_up.items()}
        assert all(value.shape == (len(real["labels"]), 64) for value in made_up.values())
        largest = 2 if task == "token_classification" else int(made_up["input_ids"].max())
        assert int(made_up["labels"].max()) == largest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"task": "translation"},
            "task='translation': must be one of 'sequence_classification', 'token_classification'",
        ),
        (
            {"task": "masked_lm", "targets": "second"},
            "targets='second': task='masked_lm' predicts tokens of the inputs",
        ),
        ({"task": "masked_lm", "inputs": "words"}, "inputs='words': task='masked_lm' needs a column of texts; this"),
        ({"task": "masked_lm", "tokenizer": None}, "tokenizer=None: task='masked_lm' needs a folder, or a name"),
        (
            {"task": "causal_lm", "inputs": ["words", "tags"]},
            "inputs=['words', 'tags']: task='causal_lm' would train on both texts; give one column, or for prompts and "
            "answers take data=chat data.prompt=words data.response=tags",
        ),
        ({"task": "causal_lm", "classes": ["a"]}, "classes=['a']: task='causal_lm' has none; leave it out"),
        ({"task": "seq2seq_lm"}, "targets=None: task='seq2seq_lm' needs a column of targets besides inputs"),
        ({"task": "seq2seq_lm", "targets": "n"}, "targets='n': task='seq2seq_lm' needs a column of texts; this one"),
        ({"task": "seq2seq_lm", "inputs": ["text", "second"], "targets": "text"}, "takes one column; give one"),
        ({"task": "token_classification", "targets": "tags"}, "inputs='text': task='token_classification' needs a"),
        (
            {"task": "token_classification", "inputs": "words", "targets": "n"},
            "targets='n': task='token_classification'",
        ),
        ({"task": "causal_lm", "inputs": "gone"}, "inputs='gone': no such column; the columns are words, tags"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [load, fake])
def test_columns_that_do_not_fit_the_task_are_refused(
    lists: dict[str, Any], function: Any, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError) as caught:
        function(**{**lists, "inputs": "text", **options})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_words_and_classes_must_be_equal_in_number(lists: dict[str, Any]):
    Path("rows.jsonl").write_text(json.dumps({"words": ["a", "b"], "tags": ["O"]}) + "\n")
    train, _ = load(**lists | TASKS["token_classification"], task="token_classification")
    with pytest.raises(ValueError, match="targets='tags': row 0 has 1 classes for 2 words; give each word one"):
        next(iter(train))


def test_a_tokenizer_without_a_mask_is_refused(lists: dict[str, Any]):
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(lists["tokenizer"])
    tokenizer.mask_token = None
    tokenizer.save_pretrained("maskless")
    with pytest.raises(ValueError, match="tokenizer='maskless': has no mask token, which task='masked_lm' needs"):
        load(**{**lists, **TASKS["masked_lm"], "task": "masked_lm", "tokenizer": "maskless"})
