"""Files of a checkpoint are hashed while they are written."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runner.checkpoints import writing
from runner.checkpoints.writing import LARGE, write_file


class RecordingHash:
    """Records the threads that hash, and the number of bytes."""

    def __init__(self):
        self.threads: set[int] = set()
        self.hashed = 0

    def update(self, data: bytearray) -> None:
        self.threads.add(threading.get_ident())
        self.hashed += len(data)

    def hexdigest(self) -> str:
        return "hash"


@pytest.mark.parametrize(
    "sizes", [[], [0], [5], [LARGE], [LARGE - 1, 2], [3, LARGE, 5 * LARGE + 7, 0, 1], [1000] * 3000]
)
def test_the_hash_is_correct_although_the_buffer_is_reused(sizes: list[int], tmp_path: Path):
    def fill(file):
        for number, size in enumerate(sizes):
            memory = bytearray([number % 251]) * size
            assert file.write(memoryview(memory)) == size
            memory[:] = bytes(size)  # as torch does with its buffers

    facts = write_file(tmp_path / "file", fill)
    content = (tmp_path / "file").read_bytes()
    assert facts == {"size": sum(sizes), "sha256": hashlib.sha256(content).hexdigest()}
    assert content == b"".join(bytes([number % 251]) * size for number, size in enumerate(sizes))


def test_a_large_file_is_hashed_by_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recording = RecordingHash()
    monkeypatch.setattr(writing, "hashlib", SimpleNamespace(sha256=lambda: recording))
    content = {"small": torch.ones(3), "large": torch.ones(LARGE), "more": torch.ones(LARGE)}
    facts = write_file(tmp_path / "file", lambda file: torch.save(content, file))  # type: ignore[arg-type]
    assert recording.hashed == facts["size"] == (tmp_path / "file").stat().st_size
    assert len(recording.threads - {threading.get_ident()}) == 1


def test_a_small_file_starts_no_thread(tmp_path: Path):
    threads: list[int] = []
    write_file(tmp_path / "file", lambda file: (file.write(bytes(1000)), threads.append(threading.active_count())))
    assert threads == [threading.active_count()]


def test_a_file_can_be_written_while_the_interpreter_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(writing.ThreadPoolExecutor, "submit", fail)
    content = bytes(range(256)) * (LARGE // 100)
    facts = write_file(tmp_path / "file", lambda file: file.write(content))
    assert facts == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
