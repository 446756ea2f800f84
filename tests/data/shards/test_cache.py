"""Tables that unpack to more than the cache may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.data.shards.cache import NoRoom, ShardCache
from runner.data.shards.parquet_shards import load_parquet_shards


def test_a_table_that_unpacks_to_more_than_the_cache_is_stopped_while_it_is_written(tmp_path: Path):
    pyarrow: Any = __import__("pyarrow.parquet")
    rows = 40_000
    table = pyarrow.table({"inputs": ["x" * 5_000] * rows, "targets": [0] * rows})  # one entry of a dictionary
    for number in range(2):
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
        assert (tmp_path / f"{number}.parquet").stat().st_size < 1_000_000
    train = load_parquet_shards(
        str(tmp_path / "*.parquet"), cache_dir=str(tmp_path / "cache"), cache_gb=0.06, num_workers=0, shuffle_shards=1
    )[0]
    with pytest.raises(NoRoom, match=r"^cache_gb=0.06: no room for '.*/0.parquet', at least 0\.\d+ GB, besides those"):
        next(iter(train))
    assert not [*(tmp_path / "cache").glob("*.partial*")]


def test_a_file_that_grows_makes_room_as_it_is_written(tmp_path: Path):
    cache = ShardCache(str(tmp_path), 100e-6)
    old, new = f"{0:032x}", f"{1:032x}"  # as all files of a cache are called
    cache.get(old, 60_000, lambda path, grow: path.write_bytes(bytes(60_000)) and None)
    seen = []

    def make(path: Path, grow: Any) -> None:
        for size in (30_000, 50_000):
            grow(size)
            seen.append(cache.has(old))
            path.write_bytes(bytes(size))

    cache.get(new, 15, make)
    assert seen == [True, False]
    assert cache.has(new)
