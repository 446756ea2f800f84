"""Tables that unpack to more than the cache may hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from python_process import wait_until

from runner.data.shards.cache import ShardCache
from runner.data.shards.parquet_shards import load_parquet_shards
from runner.failures.errors import NoRoom


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
    wait_until(lambda: not [*(tmp_path / "cache").glob("*.partial*")])  # threads that fetch ahead end too


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


def fill(cache: ShardCache, numbers: range, size: int = 10) -> None:
    for number in numbers:
        cache.get(f"{number:032x}", size, lambda path, grow: path.write_bytes(bytes(size)) and None)


@pytest.mark.parametrize(("gigabytes", "scans"), [(1, 1), (3000e-9, 1 + 600 // 18)])
def test_few_shards_scan_all_files(gigabytes: float, scans: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    scan = ShardCache._scan

    def counted(cache: ShardCache, own: Path) -> Any:
        seen.append(len([*cache.folder.glob("*.shard")]))
        return scan(cache, own)

    monkeypatch.setattr(ShardCache, "_scan", counted)
    cache = ShardCache(str(tmp_path), gigabytes)
    fill(cache, range(900))
    assert len(seen) <= scans
    assert sum(one.stat().st_size for one in tmp_path.glob("*.shard")) <= cache.limit


@pytest.mark.parametrize("noted", ["", "9" * 12, None])
def test_a_wrong_note_of_what_is_taken_removes_no_more_than_needed(noted: str | None, tmp_path: Path):
    cache = ShardCache(str(tmp_path), 1000e-9)
    fill(cache, range(100))
    note = tmp_path / "taken"
    assert note.read_text() == "1000"
    note.unlink() if noted is None else note.write_text(noted)
    fill(cache, range(100, 101))
    assert not cache.has(f"{0:032x}") and cache.has(f"{1:032x}") and note.read_text() == "1000"


def test_facts_of_shards_are_removed_when_nobody_has_used_them_for_long(tmp_path: Path):
    cache = ShardCache(str(tmp_path), 100e-9)
    for kind in ("json", "sha256", "lock", "txt"):
        for number in (1, 2):
            (tmp_path / f"{number:032x}.{kind}").touch()
        os.utime(tmp_path / f"{1:032x}.{kind}", (0, 0))
    fill(cache, range(3, 4))
    left = {one.name for one in tmp_path.glob(f"{1:032x}.*")}
    assert left == {f"{1:032x}.txt"} and len([*tmp_path.glob(f"{2:032x}.*")]) == 4


def test_description_that_cannot_be_touched_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a folder that users share: only its owner may set the time of a file."""
    pyarrow: Any = __import__("pyarrow.parquet")
    for number in range(2):
        table = pyarrow.table({"inputs": [[1.0]] * 8, "targets": [0] * 8})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
    given: dict[str, Any] = {"path": str(tmp_path / "*.parquet"), "cache_dir": str(tmp_path / "cache")}
    given |= {"num_workers": 0, "shuffle_shards": 1}
    assert len(load_parquet_shards(**given)[0]) > 0
    refused: list[str] = []
    utime = os.utime

    def refuse(path: Any, *arguments: Any, **named: Any) -> None:
        if str(path).endswith(".json"):
            refused.append(str(path))
            raise PermissionError
        utime(path, *arguments, **named)

    monkeypatch.setattr("runner.data.shards.dataset.os.utime", refuse)
    assert len(load_parquet_shards(**given)[0]) > 0
    assert len(refused) == 2
