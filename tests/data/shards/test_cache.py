"""The cache of shards: its size limit, evictions and metadata."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from python_process import wait_until

from runner.data.shards.cache import ShardCache
from runner.data.shards.parquet_shards import load_parquet_shards
from runner.failures.errors import WrongArgument


def test_a_table_that_unpacks_beyond_the_limit_is_stopped_while_it_is_written(tmp_path: Path):
    pyarrow: Any = __import__("pyarrow.parquet")
    rows = 20_000
    table = pyarrow.table({"inputs": ["x" * 5_000] * rows, "targets": [0] * rows})  # stored as one dictionary entry
    for number in range(2):
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
        assert (tmp_path / f"{number}.parquet").stat().st_size < 1_000_000
    train = load_parquet_shards(
        str(tmp_path / "*.parquet"), cache_dir=str(tmp_path / "cache"), cache_gb=0.06, num_workers=0, shuffle_shards=1
    )[0]
    message = r"^cache_gb=0.06: no room for '.*/0.parquet', at least 0\.\d+ GB, besides those"
    with pytest.raises(WrongArgument, match=message):
        next(iter(train))
    wait_until(lambda: not [*(tmp_path / "cache").glob("*.partial*")])  # the threads that prefetch have ended too


def test_room_for_a_growing_file_is_made_while_it_is_written(tmp_path: Path):
    cache = ShardCache(str(tmp_path), 100e-6)
    old, new = f"{0:032x}", f"{1:032x}"  # the names of shards in a cache
    cache.get(old, 60_000, lambda path, grow: path.write_bytes(bytes(60_000)) and None)
    is_cached = []

    def make(path: Path, grow: Any) -> None:
        for size in (30_000, 50_000):
            grow(size)
            is_cached.append(cache.has(old))
            path.write_bytes(bytes(size))

    cache.get(new, 15, make)
    assert is_cached == [True, False]
    assert cache.has(new)


def fill(cache: ShardCache, numbers: range, size: int = 10) -> None:
    for number in numbers:
        cache.get(f"{number:032x}", size, lambda path, grow: path.write_bytes(bytes(size)) and None)


@pytest.mark.parametrize(("gigabytes", "scans"), [(1, 1), (3000e-9, 1 + 150 // 18)])
def test_most_shards_are_added_without_a_scan_of_the_folder(
    gigabytes: float, scans: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    counts: list[int] = []
    scan = ShardCache._scan

    def count_scan(cache: ShardCache, own: Path) -> Any:
        counts.append(len([*cache.folder.glob("*.shard")]))
        return scan(cache, own)

    monkeypatch.setattr(ShardCache, "_scan", count_scan)
    cache = ShardCache(str(tmp_path), gigabytes)
    fill(cache, range(450))
    assert len(counts) <= scans
    assert sum(file.stat().st_size for file in tmp_path.glob("*.shard")) <= cache.limit


@pytest.mark.parametrize("content", ["", "9" * 12, None])
def test_a_wrong_record_of_the_size_evicts_no_more_than_needed(content: str | None, tmp_path: Path):
    cache = ShardCache(str(tmp_path), 1000e-9)
    fill(cache, range(100))
    record = tmp_path / "taken"
    assert record.read_text() == "1000"
    record.unlink() if content is None else record.write_text(content)
    fill(cache, range(100, 101))
    assert not cache.has(f"{0:032x}") and cache.has(f"{1:032x}") and record.read_text() == "1000"


def test_metadata_of_shards_is_removed_after_long_disuse(tmp_path: Path):
    cache = ShardCache(str(tmp_path), 100e-9)
    for kind in ("json", "sha256", "lock", "txt"):
        for number in (1, 2):
            (tmp_path / f"{number:032x}.{kind}").touch()
        os.utime(tmp_path / f"{1:032x}.{kind}", (0, 0))
    fill(cache, range(3, 4))
    remaining = {file.name for file in tmp_path.glob(f"{1:032x}.*")}
    assert remaining == {f"{1:032x}.txt"} and len([*tmp_path.glob(f"{2:032x}.*")]) == 4


def test_a_description_owned_by_another_user_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a folder that users share, only its owner may set the time of a file."""
    pyarrow: Any = __import__("pyarrow.parquet")
    for number in range(2):
        table = pyarrow.table({"inputs": [[1.0]] * 8, "targets": [0] * 8})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
    arguments: dict[str, Any] = {"path": str(tmp_path / "*.parquet"), "cache_dir": str(tmp_path / "cache")}
    arguments |= {"num_workers": 0, "shuffle_shards": 1}
    assert len(load_parquet_shards(**arguments)[0]) > 0
    refused: list[str] = []
    utime = os.utime

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith(".json"):
            refused.append(str(path))
            raise PermissionError
        utime(path, *args, **kwargs)

    monkeypatch.setattr("runner.data.shards.dataset.os.utime", refuse)
    assert len(load_parquet_shards(**arguments)[0]) > 0
    assert len(refused) == 2
