"""Remote shards, on a server that fails, is slow, or reports a wrong size."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from python_process import wait_until
from shard_files import SIZES, write_parquet, write_tars, write_tokens
from shard_server import Server, serving

from runner.data.shards import files
from runner.data.shards.cache import ShardCache
from runner.data.shards.parquet_shards import load_parquet_shards
from runner.data.shards.tar_shards import load_tar_shards
from runner.data.shards.token_shards import load_token_shards

pytest.importorskip("aiohttp")
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "parquet": (load_parquet_shards, write_parquet, {}),
    "tar": (load_tar_shards, write_tars, {"inputs": "npy"}),
    "uint16": (load_token_shards, write_tokens, {"context": 4}),
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve shards of each format, with short waits between retries."""
    monkeypatch.setattr(files, "RETRY_WAITS", (0.01, 0.01))
    folder = tmp_path / "served"
    folder.mkdir()
    for _, write, _ in KINDS.values():
        write(folder)
    with serving(folder) as server:
        yield server


def load(server: Server, kind: str, tmp_path: Path, **options: Any):
    function, _, arguments = KINDS[kind]
    sizes = {"batch_size": 5, "eval_batch_size": 4, "num_workers": 0, "shuffle_shards": 1, "cache_gb": 0.1}
    path = f"{server.url}/{{000..004}}.{kind}"
    return function(**{**sizes, "path": path, "cache_dir": str(tmp_path / "cache"), **arguments, **options})


def load_local(server: Server, kind: str, tmp_path: Path):
    """Load the files of the server from its folder."""
    return load(server, kind, tmp_path, path=str(server.folder / f"*.{kind}"), cache_dir=str(tmp_path / "other"))


def wait_for_fetches(loader: Any) -> None:
    """Wait until no shard is being prefetched."""
    for thread in loader._keys._threads:
        thread.join(60)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_remote_samples_equal_local_ones(kind: str, num_workers: int, server: Server, tmp_path: Path):
    batches = [*load(server, kind, tmp_path, num_workers=num_workers)[0]]
    expected = [*load_local(server, kind, tmp_path)[0]]
    torch.testing.assert_close(batches, expected, rtol=0, atol=0)
    assert all(count == 1 for count in server.downloads.values())


@pytest.mark.parametrize("kind", ["parquet", "uint16"])
def test_only_the_current_and_the_next_shard_are_fetched(kind: str, server: Server, tmp_path: Path):
    train, _ = load(server, kind, tmp_path)
    assert not server.downloads
    train.seek(0, len(train) - 1)
    next(iter(train))
    wait_for_fetches(train)
    shards = (*train.order.upcoming(0, len(train) - 1)[0], *train.order.upcoming(1, 0)[0])
    assert {*server.downloads} == {f"{shard:03}.{kind}" for shard in shards}


def test_an_index_is_made_once(server: Server, tmp_path: Path):
    load(server, "tar", tmp_path)
    assert [*server.downloads.values()] == [1] * len(SIZES)
    for file in (tmp_path / "cache").glob("*.shard"):
        file.unlink()
    load(server, "tar", tmp_path)
    assert [*server.downloads.values()] == [1] * len(SIZES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["fails", "breaks off", "is slow"])
def test_requests_to_a_server_that_recovers_are_retried(
    fault: str, kind: str, server: Server, tmp_path: Path, caplog: Any
):
    expected = [*load_local(server, kind, tmp_path)[0]]
    if fault == "fails":
        server.failures = 2
    elif fault == "breaks off":
        server.stops_after, server.breaks = 40, 2
    else:
        server.delay = 0.05
    with caplog.at_level(logging.WARNING, "runner"):
        batches = [*load(server, kind, tmp_path)[0]]
    torch.testing.assert_close(batches, expected, rtol=0, atol=0)
    assert ("trying again" in caplog.text) == (fault != "is slow")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("fails", ConnectionError, "cannot be read: 500"),
        ("breaks off", ConnectionError, "cannot be read: "),
        ("says more", (ConnectionError, ValueError), "bytes received|not a readable|not a multiple"),
        ("says no size", ValueError, "the server does not report the size of the file"),
        ("lacks a file", FileNotFoundError, "there is no such file"),
    ],
)
def test_a_failing_server_is_an_error_of_one_line_with_the_address(
    fault: str, error: Any, message: str, kind: str, server: Server, tmp_path: Path
):
    server.says_size = fault != "says no size"
    server.says_more = 3 * (fault == "says more")
    if fault == "breaks off":
        server.stops_after, server.breaks = 40, -1
    elif fault == "fails":
        server.failures = 10**6
    elif fault == "lacks a file":
        (server.folder / f"003.{kind}").unlink()
    with pytest.raises(error, match=f"{server.url}/00.*({message})") as raised:
        train, _ = load(server, kind, tmp_path)
        list(train)
    assert "\n" not in str(raised.value)
    # The prefetch of the next shard may fail a moment later.
    wait_until(lambda: not [*(tmp_path / "cache").glob("*.partial*")])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tags", [True, False])
def test_a_file_that_changes_during_a_run_is_refused(kind: str, tags: bool, server: Server, tmp_path: Path):
    server.tags = tags
    train, _ = load(server, kind, tmp_path)
    next(iter(train))
    wait_for_fetches(train)
    for file in (tmp_path / "cache").glob("*.shard"):  # shards fetched before the change are still valid
        file.unlink()
    for file in server.folder.glob(f"*.{kind}"):
        content = file.read_bytes()
        file.write_bytes(content if tags else content + bytes(2))
        os.utime(file, (1, 1))
    with pytest.raises(
        (ValueError, ConnectionError), match=f"{server.url}/00..{kind}.*has changed since this run began"
    ):
        list(train)


def test_other_content_of_the_same_size_is_refused_when_fetched_again(server: Server, tmp_path: Path):
    server.tags = False
    train, _ = load(server, "uint16", tmp_path)
    list(train)
    wait_for_fetches(train)
    for file in (tmp_path / "cache").glob("*.shard"):
        file.unlink()
    for file in server.folder.glob("*.uint16"):
        content = file.read_bytes()
        file.write_bytes(content[::-1])
    train, _ = load(server, "uint16", tmp_path)
    with pytest.raises(ValueError, match="its content has changed, although"):
        list(train)


def test_the_cache_removes_no_foreign_files(tmp_path: Path):
    names = ("photo.raw", "draft.partial", "data.shard", "my.12345678.9.partial.txt")
    for name in names:
        (tmp_path / name).write_bytes(b"precious" * 100)
        os.utime(tmp_path / name, (0, 0))
    cache = ShardCache(str(tmp_path), 1e-6)  # room for one file
    for number in range(3):
        cache.get(f"{number:032x}", 900, lambda path, grow: path.write_bytes(b"x" * 900) and None)
    assert {path.name for path in tmp_path.glob("*.shard")} == {"data.shard", f"{2:032x}.shard"}
    assert all((tmp_path / name).is_file() for name in names)


def test_a_cache_for_a_single_shard_is_enough(server: Server, tmp_path: Path):
    expected = [*load(server, "uint16", tmp_path)[0]]
    size = max(file.stat().st_size for file in server.folder.glob("*.uint16"))
    train, _ = load(server, "uint16", tmp_path, cache_dir=str(tmp_path / "small"), cache_gb=1.5 * size / 1e9)
    for batch, expected_batch in zip(train, expected, strict=True):
        assert all(map(torch.equal, batch, expected_batch))
        assert sum(file.stat().st_size for file in (tmp_path / "small").glob("*.shard")) <= 1.5 * size


def test_a_protocol_whose_library_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import fsspec

    def fail(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", fail)
    with pytest.raises(ImportError, match=r"path='s3://\*\*\*@.*Install s3fs.*pip install -e '.\[remote\]'"):
        load_parquet_shards("s3://user:secret@bucket/a.parquet", cache_dir=str(tmp_path))
