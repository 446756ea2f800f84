"""Damaged data: an error of one line names the shard, the member or row, and the column."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from shard_files import write_parquet, write_tar, write_tars

from runner.data.hf.columns import Columns
from runner.data.shards.parquet_shards import load_parquet_shards
from runner.data.shards.tar_shards import load_tar_shards
from runner.failures.errors import wrong_argument

LARGE = 2**63 + 1


def with_large(numbers: Any) -> Any:
    return numpy.array([LARGE if number == 15 else number for number in numbers], numpy.uint64)


def to_npy(values: Any) -> bytes:
    file = io.BytesIO()
    numpy.save(file, values)
    return file.getvalue()


def load_tars(folder: Path, **options: Any) -> Any:
    defaults = {"inputs": "npy", "cache_dir": str(folder / "cache"), "batch_size": 2, "num_workers": 0}
    return load_tar_shards(str(folder / "*.tar"), **{**defaults, **options})


def load_tables(folder: Path, **options: Any) -> Any:
    defaults = {"cache_dir": str(folder / "cache"), "batch_size": 8, "num_workers": 0}
    return load_parquet_shards(str(folder / "*.parquet"), **{**defaults, **options})


@pytest.mark.parametrize(
    ("field", "content", "reason"),
    [
        ("npy", b"no array", "member some/1.npy: "),
        ("npy", to_npy(numpy.array(["a"])), "member some/1.npy: it holds <U1; must be numbers"),
        ("npy", to_npy(numpy.array([1j])), "member some/1.npy: it holds complex128; must be numbers"),
        (
            "npy",
            to_npy(numpy.array([LARGE], numpy.uint64)),
            f"member some/1.npy: it holds {LARGE}, which is more than int64",
        ),
        ("cls", b"dog", "member some/1.cls: Expecting value"),
        ("cls", str(10**30).encode(), "member some/1.cls: "),
        ("png", b"no image", "member some/1.png: cannot be read as an image: its format is not one of JPEG"),
    ],
)
def test_an_error_names_the_bad_member_and_its_shard(field: str, content: bytes, reason: str, tmp_path: Path):
    inputs = field if field != "cls" else "npy"
    files = {"some/1.npy": to_npy(numpy.zeros(3)), "some/1.cls": b"0"} | {f"some/1.{field}": content}
    for name in ("0.tar", "1.tar"):
        write_tar(tmp_path / name, files)
    with pytest.raises(ValueError) as raised:
        next(iter(load_tars(tmp_path, inputs=inputs)[0]))
    message = str(raised.value)
    assert message.startswith(f"path='{tmp_path}/0.tar': {reason}") and "\n" not in message


def test_a_name_with_escape_sequences_is_printed_safely(tmp_path: Path):
    for name in ("0.tar", "1.tar"):
        write_tar(tmp_path / name, {"a\x1b[31m.npy": b"x", "a\x1b[31m.cls": b"0"})
    with pytest.raises(ValueError, match=r"member a\\x1b\[31m.npy: "):
        next(iter(load_tars(tmp_path)[0]))


def test_an_error_names_the_bad_row_its_shard_and_column(tmp_path: Path):
    paths = write_parquet(tmp_path, large=with_large)
    train, _ = load_tables(tmp_path, targets="large", batch_size=64)
    with pytest.raises(ValueError) as raised:
        next(iter(train))
    assert str(raised.value) == (
        f"path='{paths[1]}': row 3: targets='large': it holds {LARGE}, which is more than int64 can"
    )


def test_an_error_names_the_shard_of_a_sample_with_a_wrong_argument(tmp_path: Path):
    def decode(row: Any) -> None:
        raise wrong_argument("size", 3, "must be 4")

    write_tars(tmp_path)
    dataset = load_tars(tmp_path)[0].dataset
    dataset.decode = decode
    with pytest.raises(ValueError, match=rf"^path='{tmp_path}/\d+.tar': size=3: must be 4$"):
        dataset[0]


def test_large_numbers_of_a_column_do_not_wrap():
    datasets = pytest.importorskip("datasets")
    pyarrow: Any = __import__("pyarrow")
    content = {"a": numpy.array([1, LARGE], numpy.uint64), "b": numpy.array([2, 2])}
    rows = datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table(content)))
    columns = Columns(rows, {"inputs": "a", "targets": "b"}, None)
    assert columns[0] == (torch.tensor(1), torch.tensor(2))
    with pytest.raises(ValueError, match="inputs='a': row 1 cannot become a tensor: "):
        columns[1]


@pytest.mark.parametrize("form", ["tar", "parquet"])
@pytest.mark.parametrize(
    "change",
    [
        {"rows": "7"},
        {"rows": None},
        {"bytes": -1},
        {"columns": ["a"]},
        {"in_place": 1},
        {"index": {"fields": 3}},
        {"index": {"fields": ["npy", "cls"], "spans": [[1, 2]], "names": ["a"]}},
    ],
)
def test_a_wrong_description_in_the_cache_is_made_again(change: dict[str, Any], form: str, tmp_path: Path):
    (write_tars if form == "tar" else write_parquet)(tmp_path)
    load = load_tars if form == "tar" else load_tables
    before = next(iter(load(tmp_path)[0]))
    for file in (tmp_path / "cache").glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    after = next(iter(load(tmp_path)[0]))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_full_shared_memory_is_a_failure_of_the_environment():
    from runner.failures.facts import is_of_environment

    message = "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"
    assert is_of_environment(RuntimeError(message))
