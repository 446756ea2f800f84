"""The formats of shards, behind one interface: describe a file, prepare it for random access, and read its rows."""

from __future__ import annotations

import os
import posixpath
import tarfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from runner.data.images.decoding import is_hidden
from runner.data.text.token_cache import STORED, map_tokens
from runner.files.tar import PlainTarInfo
from runner.libraries.hugging_face import import_hf

ROWS_WRITTEN = 8192  # table rows per write
BLOCK = 512  # bytes in a block of a tar file

Description = dict[str, Any]
"""Metadata of a shard, as JSON values: `rows`, the number of rows; `bytes`, its size in the cache; `columns`, the types
by name; `in_place`, whether a local file is read without a copy in the cache; for some formats, an `index`."""


class OpenShard(ABC):
    """A shard that is open for random access."""

    @abstractmethod
    def read(self, rows: Sequence[int]) -> Any:
        """Return the rows with these numbers, in this order; the type depends on the format."""


class Format(ABC):
    """A format of shards.

    Attributes:
        suffixes: file name suffixes of this format.
        identity: settings that a prepared file depends on, as JSON values.
        described_by_a_part: suffixes of files whose metadata can be read from a small part.
        is_prepared: whether `prepare` first converts files that are not read in place.
        has_index: whether descriptions have an index.
    """

    suffixes: tuple[str, ...]
    identity: Any = None
    described_by_a_part: tuple[str, ...] = ()
    is_prepared = False
    has_index = False

    @abstractmethod
    def describe(self, file: Any, name: str, size: int) -> Description:
        """Return the metadata of a shard.

        Args:
            file: path of the file; or an open remote file, if its name ends with one of `described_by_a_part`.
            name: name of the file.
            size: size of the file in bytes.
        """

    def prepare(self, raw: Path, target: Path, grow: Callable[[int], None]) -> None:
        """Convert the file `raw` to the file `target`, which allows random access.

        Before each write, `grow` is called with the resulting size in bytes; it raises an error if there is no room.
        """
        raise NotImplementedError

    @abstractmethod
    def open(self, path: Path, description: Description) -> OpenShard:
        """Open a prepared file, or a file that is read in place."""


class Tables(Format):
    """Tables in parquet or arrow files, converted to uncompressed arrow files, which are mapped into memory.

    Args:
        columns: the columns to read.
    """

    suffixes = (".parquet", ".arrow", ".feather")
    described_by_a_part = (".parquet",)
    is_prepared = True

    def __init__(self, columns: Sequence[str]) -> None:
        self.identity = [*dict.fromkeys(columns)]

    def describe(self, file: Any, name: str, size: int) -> Description:
        with _explain_errors("not a readable parquet or arrow file"):
            if name.endswith(".parquet"):
                metadata = import_hf("pyarrow.parquet").ParquetFile(file).metadata
                schema = metadata.schema.to_arrow_schema()
                rows = metadata.num_rows
                in_place = False
                size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
            else:
                table, in_place = _map_arrow(file)
                schema = table.schema
                rows = len(table)
                size = table.nbytes
        columns = {field.name: str(field.type) for field in schema}
        return {"rows": rows, "bytes": size, "columns": columns, "in_place": in_place}

    def prepare(self, raw: Path, target: Path, grow: Callable[[int], None]) -> None:
        with _explain_errors("a damaged parquet or arrow file"):
            with raw.open("rb") as file:
                is_parquet = file.read(4) == b"PAR1"
            if is_parquet:
                parquet = import_hf("pyarrow.parquet").ParquetFile(raw, page_checksum_verification=True)
                batches = parquet.iter_batches(ROWS_WRITTEN, columns=self.identity)
            else:
                batches = iter(_map_arrow(raw)[0].select(self.identity).to_batches(ROWS_WRITTEN))
            first = next(batches)
            with import_hf("pyarrow.ipc").new_file(str(target), first.schema) as writer:
                for batch in chain([first], batches):
                    grow(target.stat().st_size + batch.nbytes)
                    writer.write_batch(batch)

    def open(self, path: Path, description: Description) -> OpenShard:
        with _explain_errors("a damaged arrow file"):
            table = _map_arrow(path)[0].select(self.identity)
        if len(table) != description["rows"]:
            raise ValueError(f"the file holds {len(table)} rows, not {description['rows']} as when it was first seen")
        return _OpenTable(table)


class _OpenTable(OpenShard):
    def __init__(self, table: Any) -> None:
        self._table = table

    def read(self, rows: Sequence[int]) -> Any:
        """Return the rows as a `pyarrow.Table`."""
        return self._table.take(rows)


def _map_arrow(path: Any) -> tuple[Any, bool]:
    """Return the table of an arrow file or stream, mapped into memory, and whether nothing had to be decoded."""
    ipc = import_hf("pyarrow.ipc")
    content = import_hf("pyarrow").memory_map(str(path)).read_buffer()
    is_file = content[:6].to_pybytes() == b"ARROW1"
    table = (ipc.open_file if is_file else ipc.open_stream)(content).read_all()
    chunks = (chunk for column in table.columns for chunk in column.chunks[:1])
    buffers = (buffer for chunk in chunks for buffer in chunk.buffers() if buffer is not None and buffer.size)
    return table, all(content.address <= buffer.address < content.address + content.size for buffer in buffers)


class Tars(Format):
    """Tar files in the layout of WebDataset: adjacent files whose names are equal up to the first dot form a sample.

    The rest of each name is a field: `a/7.jpg` and `a/7.cls` are the fields `jpg` and `cls` of sample `a/7`. Nothing is
    unpacked: an index, built once, locates the members within the tar file.
    """

    suffixes = (".tar",)
    has_index = True

    def describe(self, file: Any, name: str, size: int) -> Description:
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        last = ""
        with _explain_errors("not a readable tar file"), tarfile.open(file, "r:", tarinfo=PlainTarInfo) as tar:
            for member in tar:
                if member.isdir() or is_hidden(posixpath.normpath(member.name)):
                    continue
                sample, field = _split(member)
                if sample in samples and (sample != last or field in samples[sample]):
                    raise ValueError(
                        f"member {member.name!r}: its sample occurs twice; the files of a sample must be adjacent"
                    )
                if member.offset_data + member.size > size:
                    raise ValueError(f"member {member.name!r}: the file ends within it; fetch or make the file again")
                samples.setdefault(sample, {})[field] = member.offset_data, member.size
                last = sample
            end = tar.offset
        with open(file, "rb") as raw:
            raw.seek(end)
            if raw.read(BLOCK) != bytes(BLOCK):
                raise ValueError("the file has no end, which is a block of zeros; download or create it again")
        fields = [*dict.fromkeys(field for members in samples.values() for field in members)]
        spans = [[members.get(field, (0, 0)) for field in fields] for members in samples.values()]
        columns = {field: "file" for field in fields if all(field in members for members in samples.values())}
        index = {"fields": fields, "spans": spans, "names": [*samples]}
        return {"rows": len(samples), "bytes": size, "columns": columns, "in_place": True, "index": index}

    def open(self, path: Path, description: Description) -> OpenShard:
        return _OpenTar(path, **description["index"])


class _OpenTar(OpenShard):
    def __init__(self, path: Path, fields: list[str], spans: list[Any], names: list[str]) -> None:
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._fields = fields
        self._spans = spans
        self._names = names

    def read(self, rows: Sequence[int]) -> list[tuple[str, dict[str, bytes]]]:
        """Return, for each row, the name of the sample and the content of its files by field."""
        return [
            (self._names[row], dict(zip(self._fields, map(self._content, self._spans[row]), strict=True)))
            for row in rows
        ]

    def _content(self, span: tuple[int, int]) -> bytes:
        content = os.pread(self._file, span[1], span[0])
        if len(content) < span[1]:
            raise ValueError("the file has become shorter since this run began")
        return content


def _split(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return the sample name and the field of a member."""
    name = posixpath.normpath(member.name)
    if name.startswith(("/", "..")) or not member.isreg() or member.issparse():
        reason = "must be a plain file, with a name that stays within the archive; create it again"
        raise ValueError(f"member {member.name!r}: {reason}")
    folder, base = posixpath.split(name)
    stem, _, field = base.partition(".")
    if not stem or not field:
        raise ValueError(f"member {member.name!r}: must be named <sample>.<field>, such as 000123.jpg; create it again")
    return posixpath.join(folder, stem), field.lower()


class Tokens(Format):
    """Files of tokens stored as plain numbers, as in the token cache, and cut into windows.

    Args:
        context: inputs per window, in tokens; each window has one more token, the last target.
    """

    suffixes = described_by_a_part = tuple(f".{name}" for name in STORED)

    def __init__(self, context: int) -> None:
        self._context = context

    def describe(self, file: Any, name: str, size: int) -> Description:
        dtype = numpy.dtype(name.rpartition(".")[2])
        if size % dtype.itemsize:
            raise ValueError(f"{size} bytes are not a multiple of {dtype.name}: download or create the file again")
        rows = max(0, (size // dtype.itemsize - 1) // self._context)
        return {"rows": rows, "bytes": size, "columns": {"tokens": dtype.name}, "in_place": True}

    def open(self, path: Path, description: Description) -> OpenShard:
        tokens = map_tokens(path, numpy.dtype(description["columns"]["tokens"]))
        return _OpenTokens(tokens.unfold(0, self._context + 1, self._context))


class _OpenTokens(OpenShard):
    def __init__(self, windows: Tensor) -> None:
        self._windows = windows

    def read(self, rows: Sequence[int]) -> Tensor:
        """Return windows `(n, context + 1)`: uint8, int16 (the bits of uint16) or int32."""
        return self._windows[torch.tensor(rows)]


def is_description(content: Mapping[str, Any], form: Format) -> bool:
    """Return whether the content of a cached file, which may be damaged, is a valid description of a shard."""
    rows, size, columns, index = (content.get(name) for name in ("rows", "bytes", "columns", "index"))
    return (
        all(type(number) is int and number > 0 for number in (rows, size))
        and isinstance(columns, dict)
        and all(isinstance(kind, str) for kind in columns.values())
        and isinstance(content.get("in_place"), bool)
        and (not form.has_index or _is_index(index, rows))
    )


def _is_index(index: Any, rows: Any) -> bool:
    try:
        spans = numpy.array(index["spans"])
        return (
            spans.shape == (rows, len(index["fields"]), 2) and spans.dtype.kind == "i" and len(index["names"]) == rows
        )
    except (LookupError, TypeError, ValueError):
        return False


@contextmanager
def _explain_errors(reason: str) -> Iterator[None]:
    """Turn the errors that libraries raise for damaged or foreign files into a ValueError."""
    try:
        yield
    except (tarfile.TarError, EOFError, StopIteration) as error:
        raise ValueError(f"{reason} ({error}); download or create it again") from error
    except Exception as error:
        is_of_pyarrow = type(error).__module__.startswith("pyarrow") or (type(error) is OSError and error.errno is None)
        if not is_of_pyarrow:
            raise
        raise ValueError(f"{reason} ({' '.join(str(error).split())[:200]}); download or create it again") from error
