import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from limited_files import limited_files
from python_process import PATIENCE, wait_until

from runner.data.text import token_cache
from runner.data.text.token_cache import TokenCache

DTYPES = [numpy.dtype(name) for name in ("uint8", "uint16", "int32")]


class Parts:
    """Yields the same tokens in three parts at each call, and counts the calls."""

    def __init__(self, dtype: numpy.dtype) -> None:
        info = numpy.iinfo(dtype)
        self.tokens = numpy.linspace(0, info.max, 30_000).astype(dtype)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        yield from numpy.array_split(self.tokens, 3)


def values(tokens: torch.Tensor, dtype: numpy.dtype) -> list[int]:
    return tokens.numpy().view(dtype).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_made_once_for_each_key(dtype: numpy.dtype, tmp_path: Path):
    make = Parts(dtype)
    for _ in range(2):
        assert values(TokenCache(str(tmp_path / "a" / "b")).tokens("key", dtype, make), dtype) == make.tokens.tolist()
    assert make.calls == 1
    assert TokenCache(str(tmp_path / "a" / "b")).size("key", dtype) == 30_000
    assert TokenCache(str(tmp_path / "a" / "b")).size("other", dtype) is None
    TokenCache(str(tmp_path / "a" / "b")).tokens("other", dtype, make)
    assert make.calls == 2


def test_the_file_is_mapped_but_not_changed_by_writes_to_the_tensor(tmp_path: Path):
    make, cache = Parts(DTYPES[2]), TokenCache(str(tmp_path))
    tokens = cache.tokens("key", DTYPES[2], make)
    (file,) = tmp_path.glob("*.int32")
    assert str(file) in Path("/proc/self/maps").read_text()
    tokens[0] = 7
    assert cache.tokens("key", DTYPES[2], make)[0] == 0


def test_without_a_folder_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make = Parts(DTYPES[1])
    assert values(TokenCache(None).tokens("key", DTYPES[1], make), DTYPES[1]) == make.tokens.tolist()
    assert len(TokenCache(None).tokens("key", DTYPES[1], lambda: iter(()))) == 0
    assert make.calls == 1 and not [*tmp_path.iterdir()]


def test_a_full_disk_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make = Parts(DTYPES[1])
    with limited_files(40_000):
        tokens = TokenCache(str(tmp_path)).tokens("key", DTYPES[1], make)
        assert values(tokens, DTYPES[1]) == make.tokens.tolist()  # the written part is read back
    assert make.calls == 1 and [file.suffix for file in tmp_path.iterdir()] == [".lock"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().startswith(f"cache={str(tmp_path)!r}: tokens are")


@pytest.mark.timeout(20)
def test_tokens_lost_on_a_full_disk_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A network disk may accept more than it has room for, and report it at a later write."""
    write_all = token_cache._write_all

    def write(file, part):
        if file.tell():
            os.truncate(file.fileno(), 100)
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, part)

    monkeypatch.setattr(token_cache, "_write_all", write)
    make = Parts(DTYPES[1])
    tokens = TokenCache(str(tmp_path)).tokens("key", DTYPES[1], make)
    assert values(tokens, DTYPES[1]) == make.tokens.tolist()
    assert make.calls == 2 and [file.suffix for file in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_created_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    make = Parts(DTYPES[0])
    tokens = TokenCache(str(tmp_path / "file" / "cache")).tokens("key", DTYPES[0], make)
    assert values(tokens, DTYPES[0]) == make.tokens.tolist()
    assert "are not cached there" in caplog.text


def test_an_error_while_tokens_are_made_is_raised(tmp_path: Path):
    def make():
        yield numpy.zeros(3, DTYPES[0])
        raise PermissionError(13, "Permission denied", "text")

    with pytest.raises(PermissionError):
        TokenCache(str(tmp_path)).tokens("key", DTYPES[0], make)
    assert [file.suffix for file in tmp_path.iterdir()] == [".lock"]


PROGRAM = """
import sys, time, numpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from runner.data.text.token_cache import TokenCache
folder, seconds = sys.argv[1], float(sys.argv[2])
def make():
    with open(folder + "/made", "a") as file:
        file.write("once ")
    for number in range(10):
        time.sleep(seconds / 10)
        yield numpy.full(1000, number, numpy.uint16)
print(TokenCache(folder + "/cache").tokens("key", numpy.dtype("uint16"), make).long().sum().item())
"""


def start(folder: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_one_of_several_processes_tokenizes_even_after_another_was_killed(tmp_path: Path):
    killed = start(tmp_path, 100)
    try:
        wait_until(lambda: [file for file in tmp_path.glob("cache/*.partial") if file.stat().st_size == 0])
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    (tmp_path / "made").unlink()
    processes = [start(tmp_path, 1) for _ in range(3)]
    try:
        assert [process.communicate(timeout=PATIENCE)[0] for process in processes] == ["45000\n"] * 3
    finally:
        for process in processes:
            process.kill()
    assert (tmp_path / "made").read_text() == "once "
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".lock", ".uint16"]


def test_different_keys_have_different_files(tmp_path: Path):
    cache = TokenCache(str(tmp_path))
    keys = ["a", "b", ["a", 1], ["a", 1.5], {"a": None}]
    assert len({cache.path(json.loads(json.dumps(key)), DTYPES[0]) for key in keys}) == len(keys)
    assert cache.path(("a", 1), DTYPES[0]) == cache.path(["a", 1], DTYPES[0])


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    assert TokenCache("~/kept").folder == tmp_path / "kept"


def test_tokens_are_made_in_memory_if_another_process_makes_no_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "runner")
    make = Parts(DTYPES[0])
    lock = TokenCache(str(tmp_path)).path("key", DTYPES[0]).with_suffix(".lock")  # type: ignore[union-attr]
    hold = "import sys; from runner.files.lock import take_lock; file = open(sys.argv[1], 'w')\n"
    hold += "print(take_lock(file), flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "True\n"  # type: ignore[union-attr]
        tokens = TokenCache(str(tmp_path), patience=0.2).tokens("key", DTYPES[0], make)
    finally:
        holder.communicate("\n", timeout=PATIENCE)
    assert values(tokens, DTYPES[0]) == make.tokens.tolist()
    waiting, gave_up = caplog.messages
    assert waiting == f"another process tokenizes in {tmp_path}: waiting for it"
    assert gave_up.startswith(f"cache={str(tmp_path)!r}: tokens are not cached there: ")
    assert "has made no progress for 0.2 s" in gave_up
    assert [file.suffix for file in tmp_path.iterdir()] == [".lock"]


def test_one_of_several_threads_tokenizes(tmp_path: Path):
    make = Parts(DTYPES[1])

    def slowly():
        for part in make():
            time.sleep(0.1)
            yield part

    def read(delay: float) -> list[int]:
        time.sleep(delay)
        return values(TokenCache(str(tmp_path)).tokens("key", DTYPES[1], slowly), DTYPES[1])

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(read, (0, 0.05, 0.15))] == [make.tokens.tolist()] * 3
    assert make.calls == 1
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".lock", ".uint16"]


def test_a_folder_that_cannot_be_read_caches_nothing(tmp_path: Path):
    make, cache = Parts(DTYPES[0]), TokenCache(str(tmp_path / ("long" * 1000)))
    assert cache.size("key", DTYPES[0]) is None
    assert values(cache.tokens("key", DTYPES[0], make), DTYPES[0]) == make.tokens.tolist()


def test_a_folder_in_place_of_the_cached_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make, cache = Parts(DTYPES[0]), TokenCache(str(tmp_path))
    cache.path("key", DTYPES[0]).mkdir()  # type: ignore[union-attr]
    assert values(cache.tokens("key", DTYPES[0], make), DTYPES[0]) == make.tokens.tolist()
    assert make.calls == 1 and "Is a directory" in caplog.messages[0]


def test_an_unreadable_file_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to open file: Permission denied (13)")

    make, cache = Parts(DTYPES[0]), TokenCache(str(tmp_path))
    cache.tokens("key", DTYPES[0], make)
    monkeypatch.setattr(torch, "from_file", refuse)
    assert values(cache.tokens("key", DTYPES[0], make), DTYPES[0]) == make.tokens.tolist()
    assert "Permission denied" in caplog.messages[0]
