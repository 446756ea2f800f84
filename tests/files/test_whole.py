from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from runner.files.whole import read_object, write_atomically


def test_a_file_is_replaced_and_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("sync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("rename"), replace(*paths)))
    path = tmp_path / "a" / "file"
    for content in ("ä", b"\xff"):
        write_atomically(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert done == ["sync", "rename", "sync"] * 2 and os.listdir(path.parent) == ["file"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    write_atomically(path, "old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "file").symlink_to("precious")
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "precious").read_text() == "precious" and not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("torn", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b"\0" * 10])
def test_what_is_no_object_is_an_empty_one(torn: bytes, tmp_path: Path):
    (tmp_path / "file").write_bytes(torn)
    assert read_object(tmp_path / "file") == {} == read_object(tmp_path / "missing")
    (tmp_path / "file").write_text('{"a": 1}')
    assert read_object(tmp_path / "file") == {"a": 1}
