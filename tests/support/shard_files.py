"""Writes shards of each format, in which each sample contains its own number."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

SIZES = (12, 7, 10, 9, 11)  # rows of each shard


def write_parquet(folder: Path, sizes: Sequence[int] = SIZES, **columns: Any) -> list[Path]:
    """Write parquet files with the columns `inputs` and `targets`, and return their paths.

    The inputs are four numbers, the first of which is the number of the sample; the targets are in [0, 3).

    Args:
        folder: folder for the files.
        sizes: rows of each file.
        **columns: functions that make further columns from the sample numbers of a shard.
    """
    pyarrow = __import__("pyarrow.parquet")
    paths = []
    for shard, numbers in enumerate(_numbers(sizes)):
        content = {
            "inputs": [[float(number), number % 3, 0.5, -1.0] for number in numbers],
            "targets": [number % 3 for number in numbers],
        }
        content |= {name: make(numbers) for name, make in columns.items()}
        paths.append(folder / f"{shard:03}.parquet")
        pyarrow.parquet.write_table(pyarrow.table(content), paths[-1], row_group_size=5)
    return paths


def write_tars(folder: Path, sizes: Sequence[int] = SIZES) -> list[Path]:
    """Write the samples of `write_parquet` as tar files with the fields `npy` for inputs and `cls` for targets."""
    paths = []
    for shard, numbers in enumerate(_numbers(sizes)):
        files = {}
        for number in numbers:
            array = io.BytesIO()
            numpy.save(array, numpy.array([number, number % 3, 0.5, -1.0], numpy.float32))
            files |= {f"some/{number:05}.npy": array.getvalue(), f"some/{number:05}.cls": str(number % 3).encode()}
        paths.append(write_tar(folder / f"{shard:03}.tar", files))
    return paths


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a tar file with these contents by file name, and return its path."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_tokens(folder: Path, sizes: Sequence[int] = SIZES, context: int = 4) -> list[Path]:
    """Write token files, each with windows of `context` tokens; each window begins with the number of its sample."""
    paths = []
    for shard, numbers in enumerate(_numbers(sizes)):
        tokens = numpy.repeat(numpy.asarray([*numbers, 0], numpy.uint16), context)[: len(numbers) * context + 1]
        paths.append(folder / f"{shard:03}.uint16")
        tokens.tofile(paths[-1])
    return paths


def _numbers(sizes: Sequence[int]) -> list[range]:
    ends = numpy.cumsum(sizes).tolist()
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
