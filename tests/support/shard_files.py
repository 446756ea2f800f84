"""Shards of each format, whose samples hold their number."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

SIZES = (12, 7, 10, 9, 11)  # rows of each shard


def write_parquet(folder: Path, sizes: Sequence[int] = SIZES, **columns: Any) -> list[Path]:
    """Write files with the columns `inputs`, 4 numbers of which the first is the sample's, and `targets` in [0, 3).

    Other columns are functions from the numbers of a shard's samples.
    """
    pyarrow = __import__("pyarrow.parquet")
    paths = []
    for shard, numbers in enumerate(_numbers(sizes)):
        content = {
            "inputs": [[float(one), one % 3, 0.5, -1.0] for one in numbers],
            "targets": [one % 3 for one in numbers],
        }
        content |= {name: make(numbers) for name, make in columns.items()}
        paths.append(folder / f"{shard:03}.parquet")
        pyarrow.parquet.write_table(pyarrow.table(content), paths[-1], row_group_size=5)
    return paths


def write_arrow(folder: Path, sizes: Sequence[int] = SIZES, stream: bool = False, compression: str | None = None):
    """Write the same as arrow files or streams."""
    pyarrow = __import__("pyarrow.parquet")
    ipc = __import__("pyarrow.ipc").ipc
    options = ipc.IpcWriteOptions(compression=compression)
    for path in write_parquet(folder, sizes):
        table = pyarrow.parquet.read_table(path)
        path.unlink()
        make = ipc.new_stream if stream else ipc.new_file
        with make(str(path.with_suffix(".arrow")), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=3)


def write_tars(folder: Path, sizes: Sequence[int] = SIZES) -> list[Path]:
    """Write tar files with the fields `npy`, the inputs of `write_parquet`, and `cls`."""
    paths = []
    for shard, numbers in enumerate(_numbers(sizes)):
        files = {}
        for one in numbers:
            array = io.BytesIO()
            numpy.save(array, numpy.array([one, one % 3, 0.5, -1.0], numpy.float32))
            files |= {f"some/{one:05}.npy": array.getvalue(), f"some/{one:05}.cls": str(one % 3).encode()}
        paths.append(write_tar(folder / f"{shard:03}.tar", files))
    return paths


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a tar file of some files."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_tokens(folder: Path, sizes: Sequence[int] = SIZES, context: int = 4) -> list[Path]:
    """Write files with these numbers of windows; a window begins with the number of its sample."""
    paths = []
    for shard, numbers in enumerate(_numbers(sizes)):
        tokens = numpy.repeat(numpy.asarray([*numbers, 0], numpy.uint16), context)[: len(numbers) * context + 1]
        paths.append(folder / f"{shard:03}.uint16")
        tokens.tofile(paths[-1])
    return paths


def _numbers(sizes: Sequence[int]) -> list[range]:
    ends = numpy.cumsum(sizes).tolist()
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
