import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import TEXT, make_tokenizer

from runner.data.text import text_files
from runner.data.text.text_files import load_text_files

SIZES = {"context": 8, "batch_size": 4, "eval_batch_size": 3}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Write three `.txt` files, one in a subfolder, and a file of another kind; return the folder."""
    folder = tmp_path / "texts"
    (folder / "a").mkdir(parents=True)
    (folder / "b.txt").write_text(TEXT)
    (folder / "a" / "z.txt").write_text("first\r\n" + TEXT, newline="")
    (folder / "c.txt").write_text("last")
    (folder / "notes.md").write_text("no part of it")
    return folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(folder: Path, **options: Any):
    return load_text_files(str(folder), **{**SIZES, "cache": None, **options})


def joined(loaders) -> list[int]:
    """Return the loaders' tokens in text order, without the shuffling of training."""
    tokens = []
    for loader in loaders:
        windows = loader.tensors[0].long() & 0xFFFF
        tokens += [*windows[:, :-1].flatten().tolist(), int(windows[-1, -1])]
    return tokens


def test_without_a_tokenizer_the_tokens_are_the_bytes_of_the_files_in_order(texts: Path):
    content = b"".join((texts / name).read_bytes() for name in ("a/z.txt", "b.txt", "c.txt"))
    train, evaluation = load(texts, eval_share=0.25)
    start = len(content) - round(len(content) * 0.25)
    assert bytes(joined([train])) == content[:start][: (start - 1) // 8 * 8 + 1]
    assert bytes(joined([evaluation])) == content[start:][: (len(content) - start - 1) // 8 * 8 + 1]
    inputs, targets = next(iter(train))
    assert inputs.shape == targets.shape == (4, 8) and inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_test_share_holds_out_the_last_tokens(texts: Path, tmp_path: Path):
    content = b"".join((texts / name).read_bytes() for name in ("a/z.txt", "b.txt", "c.txt"))
    (tmp_path / "eval.txt").write_text(TEXT)
    count = round(len(content) * 0.25)
    for paths, start in (({}, len(content) - 2 * count), ({"eval_path": str(tmp_path / "eval.txt")}, None)):
        train, evaluation, test = load(texts, eval_share=0.25, test_share=0.25, context=1, **paths)
        assert bytes(joined([test])) == content[-count:]
        expected = TEXT.encode() if start is None else content[start:-count]
        assert bytes(joined([evaluation])) == expected
        assert bytes(joined([train])) == content[: -count if start is None else start]


def test_tokens_equal_those_of_transformers_with_an_end_token_after_each_file(texts: Path, tokenizer: str):
    reference: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tokenizer)
    names = ("a/z.txt", "b.txt", "c.txt")
    expected = [
        token
        for name in names
        for token in [*reference(texts.joinpath(name).read_bytes().decode())["input_ids"], reference.eos_token_id]
    ]
    train, evaluation = load(texts, eval_path=str(texts / "b.txt"), pattern="[ac]*/*.txt", tokenizer=tokenizer)
    tokens = joined([train])
    train_size = expected.index(reference.eos_token_id) + 1
    assert tokens == expected[: (train_size - 1) // 8 * 8 + 1]
    eval_expected = expected[train_size:]
    assert joined([evaluation]) == eval_expected[: eval_expected.index(reference.eos_token_id) // 8 * 8 + 1]
    whole, _ = load(texts, eval_share=1e-9 + 9.5 / len(expected), tokenizer=tokenizer, context=1)
    assert joined([whole]) == expected[: len(joined([whole]))]
    assert len(joined([whole])) >= len(expected) - 10


def test_a_tokenizer_without_an_end_token_adds_none_between_files(texts: Path, tmp_path: Path):
    name = make_tokenizer(tmp_path / "tokenizer", end=None)
    reference: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(name)
    train, _ = load(texts, tokenizer=name, context=1, eval_share=0.5)
    assert reference.decode(joined([train])).startswith("first\r\n" + TEXT[:1000])


def test_cutting_long_files_at_line_ends_keeps_tokens(texts: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch):
    whole = [joined([loader]) for loader in load(texts, tokenizer=tokenizer)]
    monkeypatch.setattr(text_files, "PIECE", 400)
    pieces = [text for text, _ in text_files._pieces([texts / "b.txt"])]
    assert len(pieces) > 3 and "".join(pieces) == TEXT and all(piece.endswith("\n") for piece in pieces)
    assert [joined([loader]) for loader in load(texts, tokenizer=tokenizer)] == whole
    (texts / "b.txt").write_text("x" * 2000)  # has no line end
    assert "".join(text for text, _ in text_files._pieces([texts / "b.txt"])) == "x" * 2000


def test_tokens_are_cached_until_the_files_change(texts: Path, tokenizer: str, tmp_path: Path):
    options = {"tokenizer": tokenizer, "cache": str(tmp_path / "kept")}
    first = load(texts, **options)

    def cached() -> list[Path]:
        return sorted(tmp_path.glob("kept/*.uint16"))

    (file,) = cached()
    before = file.stat()
    assert joined(load(texts, **options)) == joined(first) == joined(load(texts, tokenizer=tokenizer))
    assert cached() == [file] and file.stat().st_mtime_ns == before.st_mtime_ns
    os.utime(texts / "b.txt", (1, 1))
    load(texts, **options)
    assert len(cached()) == 2
    smaller = make_tokenizer(tmp_path / "smaller", vocab_size=280)
    load(texts, **{**options, "tokenizer": smaller})
    assert len(cached()) == 3


@pytest.mark.parametrize("tokenized", [False, True])
@pytest.mark.parametrize("eval_path", [False, True])
@pytest.mark.parametrize("test", [{}, {"test_share": 0.2}, {"test_path": "tested.txt"}], ids=str)
def test_fake_loaders_have_the_lengths_and_shapes_of_the_real_ones(
    texts: Path,
    tokenizer: str,
    tmp_path: Path,
    tokenized: bool,
    eval_path: bool,
    test: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tested.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(TEXT)
    signature = {key: parameter.default for key, parameter in inspect.signature(load_text_files).parameters.items()}
    options = {**signature, **SIZES, "path": str(texts), "eval_tokens": 500, "cache": str(tmp_path / "kept")}
    options |= test
    options["tokenizer"] = tokenizer if tokenized else None
    options["eval_path"] = str(tmp_path / "other.txt") if eval_path else None
    fake: Any = vars(load_text_files)["fake"]
    estimates = fake(**options)  # made before the text is tokenized
    real = load_text_files(**options)
    assert len(real) == (3 if test else 2)
    for loader, fake_loader, estimated in zip(real, fake(**options), estimates, strict=True):
        assert (len(loader), loader.order.num_samples) == (len(fake_loader), fake_loader.order.num_samples)
        assert tokenized or len(estimated) == len(loader)
        batch, fake_batch = next(iter(loader)), next(iter(fake_loader))
        assert [tensor.shape for tensor in fake_batch] == [tensor.shape for tensor in batch]
        assert fake_batch[0].dtype == torch.int64 and fake_batch[1].max() == (299 if tokenized else 255)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "path": ({"path": "nowhere"}, "path='nowhere': does not exist; give a text file or a folder"),
    "eval_path": ({"eval_path": "nowhere"}, "eval_path='nowhere': does not exist; give a text file or a folder"),
    "no match": ({"pattern": "*.rst"}, "no file in this folder matches pattern='.*.rst'"),
    "absolute pattern": ({"pattern": "/x"}, "pattern='/x'"),
    "trained on": ({"eval_path": "texts/b.txt"}, "eval_path='texts/b.txt': .*b.txt' is also in path; give different"),
    "context": ({"context": 0}, "context=0: must be a whole number, at least 1"),
    "batch_size": ({"batch_size": 0}, "batch_size=0: must be a whole number, at least 1"),
    "eval_batch_size": ({"eval_batch_size": 0}, "eval_batch_size=0: must be a whole number, at least 1"),
    "long": ({"context": 10_000}, "context=10000: must be shorter than the text, which has 5986 tokens to train on"),
    "share": ({"eval_share": 1.0}, "eval_share=1.0: must be a number above 0 and below 1"),
    "both": ({"test_path": "texts", "test_share": 0.1}, "test_share=0.1: give a share .* or test_path, not both"),
    "sum of shares": (
        {"eval_share": 0.5, "test_share": 0.5},
        "test_share=0.5: must be at least 0, and its sum with eval_share below 1",
    ),
    "test_share": (
        {"eval_path": "texts/c.txt", "test_share": -0.5},
        "test_share=-0.5: must be a number, at least 0 and below 1",
    ),
    "test trained on": ({"test_path": "texts/c.txt"}, "test_path='texts/c.txt': .*c.txt' is also in path"),
    "small share": (
        {"eval_share": 1e-6},
        "context=8: must be shorter than the text, which has 0 tokens to evaluate on",
    ),
    "eval_tokens": ({"eval_tokens": 7}, "eval_tokens=7: must be at least one window of context=8 tokens"),
    "tokenizer": ({"tokenizer": "texts"}, "tokenizer='texts': transformers cannot load it"),
    "no tokenizer": ({"tokenizer": "./none"}, "tokenizer='./none': transformers cannot load it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_refused_in_one_line(
    case: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    options, message = {"path": "texts", **WRONG[case][0]}, WRONG[case][1]
    with pytest.raises((OSError, ValueError), match=message) as raised:
        load_text_files(**{**SIZES, **options})
    assert "\n" not in str(raised.value)


def test_a_text_for_a_tokenizer_must_be_utf_8(texts: Path, tokenizer: str, tmp_path: Path):
    (texts / "b.txt").write_bytes(b"fine\n\xff\xfe")
    load(texts)
    with pytest.raises(ValueError, match=r"path: .*b.txt' is not UTF-8 .*tokenizer=null"):
        load(texts, tokenizer=tokenizer, cache=str(tmp_path / "kept"))
    assert not [*tmp_path.glob("kept/*.partial")]


def test_a_missing_library_is_an_error_that_says_how_to_install_it(texts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"transformers is not installed here: pip install -e '\.\[hf\]'"):
        load(texts, tokenizer="gpt2")
