"""Columns of texts as batches of tokens, and names of classes as numbers."""

from __future__ import annotations

import json
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
    tokenizer.mask_token = "<mask>"
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
        ({"inputs": "one", "tokenizer": None}, "inputs='one': this column holds texts; set tokenizer="),
        ({"inputs": "number"}, "inputs='number' holds Value('int64'), not texts; leave tokenizer out"),
        ({"inputs": ["one", "number"]}, "two columns must both hold texts, but 'number' holds"),
        ({"inputs": ["one", "other", "label"]}, "must be one column, or two columns of texts"),
        ({"inputs": ["one", "x"]}, "inputs='x': no such column; the columns are one, other, label, number"),
        ({"inputs": "one", "classes": ["a", "b"]}, "classes=['a', 'b']: the column 'label' also has 'c'; add it"),
        ({"inputs": "one", "targets": "number", "classes": ["a"]}, "classes=['a']: is for targets that are texts"),
        ({"inputs": "one", "targets": "gone"}, "targets='gone': no such column"),
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
        Encoder(make_tokenizer(tmp_path), 8)


WORDS = [["the", "quick", "fox"], ["lazy", "dogs", "sleep", "over"], ["Öl"]]
TAGS = [["O", "A", "N"], ["A", "N", "O", "O"], ["N"]]
TASKS: dict[str, dict[str, Any]] = {
    "token_classification": {"inputs": "words", "targets": "tags"},
    "masked_lm": {"inputs": "text", "targets": None},
    "causal_lm": {"inputs": "text", "targets": None},
    "seq2seq_lm": {"inputs": "text", "targets": "other"},
}


@pytest.fixture
def lists(pairs: dict[str, Any]) -> dict[str, Any]:
    """A file of JSON lines with words, a class of each, and two texts."""
    rows = [
        {"words": words, "tags": tags, "text": " ".join(words), "other": " ".join(reversed(words)), "n": 1}
        for words, tags in zip(WORDS * 4, TAGS * 4, strict=True)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**pairs, "name": "json", "data_files": "rows.jsonl", "context": 64, "targets": None}


def test_the_first_token_of_a_word_has_its_class(lists: dict[str, Any]):
    outside: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(lists["tokenizer"])
    _, evaluation = load(**lists | TASKS["token_classification"], task="token_classification")
    batch = next(iter(evaluation))
    theirs = outside(WORDS, is_split_into_words=True, padding=True, return_tensors="pt")
    assert all(torch.equal(batch[name], one) for name, one in theirs.items())
    for row, (labels, tags) in enumerate(zip(batch["labels"], TAGS, strict=True)):
        words_of = theirs.word_ids(row)
        firsts = [place for place, word in enumerate(words_of) if word is not None and word not in words_of[:place]]
        assert labels[firsts].tolist() == ["ANO".index(tag) for tag in tags]
        assert (labels != -100).sum() == len(tags)


def test_hidden_tokens_are_the_labels_and_are_the_same_whoever_reads_them(
    lists: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    options = {**lists, **TASKS["masked_lm"], "task": "masked_lm", "eval_batch_size": 4}

    def samples(part: int, epoch: int = 0, **more: Any) -> dict[tuple[int, ...], int]:
        """How often each sample was seen, without its padding."""
        loader = load(**options, **more)[part]
        loader.seek(epoch, 0)
        found: dict[tuple[int, ...], int] = {}
        for batch in loader:
            for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
                kept = mask.bool()
                assert (labels[~kept] == -100).all() and (labels != -100).any()
                key = (*ids[kept].tolist(), -1, *labels[kept].tolist())
                found[key] = found.get(key, 0) + 1
        return found

    alone = samples(0)
    assert samples(0) == alone != samples(0, epoch=1)
    found: dict[tuple[int, ...], int] = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        for key, count in samples(0).items():
            found[key] = found.get(key, 0) + count
    assert found == alone


def test_labels_of_language_are_tokens(lists: dict[str, Any]):
    outside: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(lists["tokenizer"])
    (batch, *_) = load(**lists | TASKS["causal_lm"], task="causal_lm")[1]
    kept = batch["attention_mask"].bool()
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept]) and (batch["labels"][~kept] == -100).all()
    (batch, *_) = load(**lists | TASKS["seq2seq_lm"], task="seq2seq_lm")[1]
    for labels, words in zip(batch["labels"], WORDS, strict=True):
        assert labels[labels != -100].tolist() == outside(" ".join(reversed(words)))["input_ids"]


@pytest.mark.parametrize("task", TASKS)
def test_made_up_batches_of_each_task_have_the_names_and_types_of_real_ones(lists: dict[str, Any], task: str):
    options = {**lists, **TASKS[task], "task": task, "test_split": "train[:5]"}
    for real, made_up in zip(load(**options), fake(**options), strict=True):
        assert len(real) == len(made_up)
        one, other = next(iter(real)), next(iter(made_up))
        assert {name: value.dtype for name, value in one.items()} == {n: value.dtype for n, value in other.items()}
        assert all(value.shape == (len(one["labels"]), 64) for value in other.values())
        assert int(other["labels"].max()) == (2 if task == "token_classification" else int(other["input_ids"].max()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"task": "translation"},
            "task='translation': must be one of 'sequence_classification', 'token_classification'",
        ),
        ({"task": "masked_lm", "targets": "other"}, "targets='other': task='masked_lm' predicts tokens of the inputs"),
        ({"task": "masked_lm", "inputs": "words"}, "inputs='words': task='masked_lm' needs a column of texts; this"),
        ({"task": "masked_lm", "tokenizer": None}, "tokenizer=None: task='masked_lm' needs a folder, or a name"),
        ({"task": "causal_lm", "classes": ["a"]}, "classes=['a']: task='causal_lm' has none; leave it out"),
        ({"task": "seq2seq_lm"}, "targets=None: task='seq2seq_lm' needs a column of targets beside inputs"),
        ({"task": "seq2seq_lm", "targets": "n"}, "targets='n': task='seq2seq_lm' needs a column of texts; this one"),
        ({"task": "seq2seq_lm", "inputs": ["text", "other"], "targets": "text"}, "takes one column; give one"),
        ({"task": "token_classification", "targets": "tags"}, "inputs='text': task='token_classification' needs a"),
        (
            {"task": "token_classification", "inputs": "words", "targets": "n"},
            "targets='n': task='token_classification'",
        ),
        ({"task": "causal_lm", "inputs": "gone"}, "inputs='gone': no such column; the columns are words, tags"),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", [load, fake])
def test_columns_that_do_not_fit_the_task(lists: dict[str, Any], how: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        how(**{**lists, "inputs": "text", **options})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_words_and_classes_of_different_number(lists: dict[str, Any]):
    Path("rows.jsonl").write_text(json.dumps({"words": ["a", "b"], "tags": ["O"]}) + "\n")
    train, _ = load(**lists | TASKS["token_classification"], task="token_classification")
    with pytest.raises(ValueError, match="targets='tags': row 0 has 1 classes for 2 words; give each word one"):
        next(iter(train))


def test_a_tokenizer_without_a_mask(lists: dict[str, Any]):
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(lists["tokenizer"])
    tokenizer.mask_token = None
    tokenizer.save_pretrained("maskless")
    with pytest.raises(ValueError, match="tokenizer='maskless': has no mask token, which task='masked_lm' needs"):
        load(**{**lists, **TASKS["masked_lm"], "task": "masked_lm", "tokenizer": "maskless"})
