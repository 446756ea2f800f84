"""Writes a model's predictions to a file, batch by batch: each sample once, in order, from all ranks."""

from __future__ import annotations

import csv
import functools
import json
import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from runner.distributed.ranks import get_data_parallel_size, get_global_rank, get_world_size
from runner.failures.errors import WrongConfig
from runner.training.dataloader import BatchStream
from runner.training.evaluation import predict_each
from runner.training.trainer import Trainer

Columns = dict[str, Tensor | list[str]]
"""By name, tensors on the CPU with a row for each sample, and lists with a text for each sample."""
Table = Mapping[str, Tensor | list[Any]]
"""Like `Columns`, but a list may also hold a list of texts for each sample."""


def write_predictions(trainer: Trainer, loader: Any, path: Path, ids: Sequence[str] | None = None) -> tuple[int, str]:
    """Write `Model.predictions` of every sample; return their number and a phrase for their order. All ranks.

    The column `index` numbers the samples in that order. A loader with an `order` is read without shuffling, and any
    other loader in its own order. The column `id` has the `ids`, if there are any. The column `class` has the name of
    the predicted class, or a list of names if a sample may have several classes. Memory holds one batch at a time, or
    all batches for a `.pt` file. Rank 0 writes the file, whose suffix is `.parquet`, `.csv`, `.jsonl` or `.pt`. It
    appears only when it is complete.

    Raises:
        ValueError: the model's predictions are neither tensors with a row for each sample nor lists of texts.
        OSError: the file cannot be written.
        WrongConfig: the file is `.pt`, and samples have predictions of different shapes.
    """
    state = trainer.state
    model = state.unwrapped_model
    names: Any = getattr(model, "class_names", None)
    order = getattr(loader, "order", None)
    if order is not None:
        order.read_all_in_sequence()
    stream = BatchStream(loader, state.device, state.precision, model.num_samples, "predict", state.rank_zero_seed)
    partial = path.with_name(f".{path.name}.partial")
    file: _File | None = None
    if get_global_rank() == 0:
        kinds: dict[str, Any] = {".parquet": _ParquetFile, ".pt": _TensorFile}
        make_file = kinds.get(path.suffix, functools.partial(_TextFile, is_csv=path.suffix == ".csv", classes=names))
        file = make_file(partial)
    rows = 0

    def take(outputs: Any, samples: int) -> None:
        nonlocal rows
        local = _columns(model.predictions(state.batch, outputs), model.num_samples(state.batch), samples)
        for columns in _gather(local):
            count = len(next(iter(columns.values())))
            if file is not None and count:
                id_column = {} if ids is None else {"id": [*ids[rows : rows + count]]}
                classes = _class_column(columns, names)
                file.write({"index": torch.arange(rows, rows + count), **id_column, **classes, **columns})
            rows += count

    try:
        predict_each(trainer.run, stream, take)
        if file is not None and rows:
            file.close()
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return rows, "the order of the data set" if order is not None else "the order in which the loader yielded them"


def _columns(predictions: Any, num_samples: int, num_counted: int) -> Columns:
    """Return the predictions of the first `num_counted` samples of a batch, on the CPU; the others are padding."""
    for name, value in predictions.items():
        is_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
        is_rows = is_texts or (isinstance(value, Tensor) and value.ndim > 0)
        if not is_rows or len(value) != num_samples:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"predictions[{name!r}] is {shown} for a batch of {num_samples} samples: override Model.predictions to "
                "return tensors with a row for each sample, or lists with a text for each"
            )
    return {
        name: value[:num_counted].detach().cpu() if isinstance(value, Tensor) else value[:num_counted]  # intended sync
        for name, value in predictions.items()
    }


def _gather(columns: Columns) -> list[Columns]:
    """Return the columns of all ranks, each sample once, on rank 0; an empty list on other ranks. All ranks.

    Nothing is unpickled.
    """
    if get_world_size() == 1:
        return [columns]
    buffer = BytesIO()
    torch.save(columns, buffer)
    sizes = [torch.tensor(0) for _ in range(get_world_size())]
    distributed.all_gather(sizes, torch.tensor(buffer.tell()))
    largest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(buffer.getvalue().ljust(largest, b"\0")), dtype=torch.uint8)
    shares = [torch.empty_like(padded) for _ in sizes] if get_global_rank() == 0 else None
    distributed.gather(padded, shares)
    group_size = get_world_size() // get_data_parallel_size()  # consecutive ranks that have the same samples
    return [
        torch.load(BytesIO(share[:size].numpy().tobytes()), weights_only=True)
        for share, size in [*zip(shares or [], sizes, strict=False)][::group_size]
    ]


def _class_column(columns: Columns, classes: Sequence[str] | None) -> dict[str, list[Any]]:
    """Return the column `class` with a class name, or a list of them, for each sample; {} if classes have no names."""
    prediction = columns.get("prediction")
    if classes is None or not isinstance(prediction, Tensor) or "probabilities" not in columns:
        return {}
    if prediction.ndim == 1:
        return {"class": [classes[number] for number in prediction.tolist()]}
    return {"class": [[name for name, has in zip(classes, row, strict=True) if has] for row in prediction.tolist()]}


class _File(Protocol):
    def write(self, columns: Table) -> None: ...

    def close(self) -> None: ...


class _ParquetFile:
    """A Parquet file with a row group for each rank's part of a batch; multidimensional values are nested lists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def write(self, columns: Table) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        table = pyarrow.table({name: _arrow(column) for name, column in columns.items()})
        if self._writer is None:
            self._writer = ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()


class _TextFile:
    """A CSV or JSON Lines file with a row for each sample.

    Probabilities of C classes are C columns `probabilities.NAME` in CSV, and a mapping in JSON. Other lists are written
    as JSON in both.
    """

    def __init__(self, path: Path, is_csv: bool, classes: Sequence[str] | None) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._is_csv = is_csv
        self._classes = classes
        self._writer: Any = None

    def write(self, columns: Table) -> None:
        values = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in columns.items()}
        for sample in zip(*values.values(), strict=True):
            row = dict(zip(values, sample, strict=True))
            probabilities = row.get("probabilities")
            if isinstance(probabilities, list) and not isinstance(probabilities[0], list):
                row["probabilities"] = dict(zip(self._classes or range(len(probabilities)), probabilities, strict=True))
            self._write_row(row)

    def _write_row(self, row: dict[str, Any]) -> None:
        if not self._is_csv:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            return
        cells: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, dict):
                cells |= {f"{name}.{key}": number for key, number in value.items()}
            else:
                cells[name] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, [*cells])
            self._writer.writeheader()
        self._writer.writerow(cells)

    def close(self) -> None:
        self._file.close()


class _TensorFile:
    """A file with a dict of columns by name, which `torch.load` reads with `weights_only=True`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._batches: list[Table] = []

    def write(self, columns: Table) -> None:
        previous = self._batches[-1] if self._batches else columns
        for name, value in columns.items():
            other = previous[name]
            if isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape[1:] != other.shape[1:]:
                shapes = f"{tuple(other.shape[1:])} and {tuple(value.shape[1:])}"
                reason = f"samples of {name} have different shapes, {shapes}; give --format=parquet"
                raise WrongConfig(f"--format='pt': {reason}", "--format", fix="--format=parquet")
        self._batches.append(columns)

    def close(self) -> None:
        torch.save({name: _joined([batch[name] for batch in self._batches]) for name in self._batches[0]}, self._path)


def _joined(parts: Sequence[Any]) -> Any:
    return torch.cat([*parts]) if isinstance(parts[0], Tensor) else [text for part in parts for text in part]


def _arrow(values: Tensor | list[Any]) -> Any:
    """Return a tensor as an Arrow column of numbers or nested lists of numbers, and a list as a column of texts."""
    import numpy
    import pyarrow

    if isinstance(values, list):
        return pyarrow.array(values, pyarrow.list_(pyarrow.string()) if isinstance(values[0], list) else None)
    if values.is_floating_point() and values.itemsize < 4:
        values = values.float()  # numpy and Parquet do not support all small floating-point types of torch
    column = pyarrow.array(values.reshape(-1).numpy())
    for dim, size in reversed([*enumerate(values.shape)][1:]):
        lists = values.shape[:dim].numel()
        offsets = pyarrow.array(numpy.arange(lists + 1, dtype="int32") * size)
        column = pyarrow.ListArray.from_arrays(offsets, column)
    return column
