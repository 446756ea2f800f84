from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from runner.files.whole import read_object, write_atomically


def test_a_file_is_synced_before_its_rename_and_its_folder_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("sync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    path = tmp_path / "a" / "file"
    for content in ("ä", b"\xff"):
        write_atomically(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert calls == ["sync", "rename", "sync"] * 2 and os.listdir(path.parent) == ["file"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    write_atomically(path, "old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600

    def fail(file: int) -> None:
        raise OSError(errno.ENOSPC, "disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk is full"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_symbolic_link_is_replaced_and_not_followed(tmp_path: Path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "file").symlink_to("precious")
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "precious").read_text() == "precious" and not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b"\0" * 10])
def test_a_file_without_a_json_object_is_read_as_an_empty_object(content: bytes, tmp_path: Path):
    (tmp_path / "file").write_bytes(content)
    assert read_object(tmp_path / "file") == {} == read_object(tmp_path / "missing")
    (tmp_path / "file").write_text('{"a": 1}')
    assert read_object(tmp_path / "file") == {"a": 1}
