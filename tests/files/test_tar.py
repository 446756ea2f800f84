"""Tar files: large headers and sparse members are refused, and long names are read."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path

import pytest

from runner.data.shards.formats import Tars
from runner.files.tar import LARGEST


def header(kind: bytes, size: int, name: str = "a") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def write_tar(path: Path, *blocks: bytes) -> Path:
    path.write_bytes(b"".join(block + bytes(-len(block) % 512) for block in blocks) + bytes(1024))
    return path


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_large_header_is_refused_before_it_is_parsed(kind: bytes, tmp_path: Path):
    path = write_tar(
        tmp_path / "a.tar", header(kind, 200_000), b"1" * 200_000, header(tarfile.REGTYPE, 1, "0.cls"), b"1"
    )
    start = time.monotonic()
    with pytest.raises(
        ValueError, match=rf"not a readable tar file \(a header has 200,000 bytes, at most {LARGEST:,} are"
    ):
        Tars().describe(path, "a.tar", path.stat().st_size)
    assert time.monotonic() - start < 5


def test_a_sparse_member_is_refused(tmp_path: Path):
    path = write_tar(tmp_path / "a.tar", header(tarfile.GNUTYPE_SPARSE, 0, "0.cls"))
    with pytest.raises(ValueError, match=r"member '0.cls' is sparse"):
        Tars().describe(path, "a.tar", path.stat().st_size)


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_are_read(format: int, tmp_path: Path):
    name = "/".join(["folder" * 20] * 8) + "/0.cls"
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=format) as tar:
        info = tarfile.TarInfo(name)
        info.size = 1
        tar.addfile(info, io.BytesIO(b"7"))
    description = Tars().describe(path, "a.tar", path.stat().st_size)
    assert description["index"]["names"] == [name.removesuffix(".cls")]
