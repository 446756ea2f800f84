"""Writes a model's predictions to a file, batch by batch: each sample once, in order, from all ranks."""

from __future__ import annotations

import os
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

Columns = dict[str, Tensor]
"""Tensors on the CPU by name; dimension 0 is the sample."""


def write_predictions(trainer: Trainer, loader: Any, path: Path) -> tuple[int, str]:
    """Write `Model.predictions` of every sample; return the number of samples, and a phrase for their order. All ranks.

    The column `index` numbers the samples in that order. A loader with an `order` is read without shuffling, any other
    as it is. Memory holds one batch at a time, or all batches for a `.pt` file. Rank 0 writes the file, `.parquet` or
    `.pt`, which appears only when it is complete.

    Raises:
        ValueError: the model's predictions are not tensors with a row for each sample.
        OSError: the file cannot be written.
        WrongConfig: the file is `.pt`, and samples have predictions of different shapes.
    """
    state = trainer.state
    model = state.unwrapped_model
    order = getattr(loader, "order", None)
    if order is not None:
        order.read_all_in_sequence()
    stream = BatchStream(loader, state.device, state.precision, model.num_samples, "predict", state.rank_zero_seed)
    partial = path.with_name(f".{path.name}.partial")
    file: _File | None = None
    if get_global_rank() == 0:
        file = _ParquetFile(partial) if path.suffix == ".parquet" else _TensorFile(partial)
    rows = 0

    def take(outputs: Any, samples: int) -> None:
        nonlocal rows
        mine = _columns(model.predictions(state.batch, outputs), model.num_samples(state.batch), samples)
        for columns in _gather(mine):
            count = len(next(iter(columns.values())))
            if file is not None and count:
                file.write({"index": torch.arange(rows, rows + count), **columns})
            rows += count

    try:
        predict_each(trainer.run, stream, take)
        if file is not None and rows:
            file.close()
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return rows, "the order of the data set" if order is not None else "the order in which the loader gave them"


def _columns(predictions: Any, num_samples: int, counting: int) -> Columns:
    """Return the rows of the first `counting` samples of a batch; the others are padding."""
    for name, value in predictions.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != num_samples:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"predictions[{name!r}] is {shown} for a batch of {num_samples} samples: override Model.predictions to "
                "return tensors with a row for each sample"
            )
    return {name: value[:counting].detach().cpu() for name, value in predictions.items()}  # The intended sync.


def _gather(columns: Columns) -> list[Columns]:
    """Return on rank 0 the columns of all ranks, each sample once, and on other ranks an empty list. All ranks.

    Nothing is unpickled.
    """
    if get_world_size() == 1:
        return [columns]
    buffer = BytesIO()
    torch.save(columns, buffer)
    sizes = [torch.tensor(0) for _ in range(get_world_size())]
    distributed.all_gather(sizes, torch.tensor(buffer.tell()))
    largest = max(int(size) for size in sizes)
    mine = torch.frombuffer(bytearray(buffer.getvalue().ljust(largest, b"\0")), dtype=torch.uint8)
    shares = [torch.empty_like(mine) for _ in sizes] if get_global_rank() == 0 else None
    distributed.gather(mine, shares)
    return [
        torch.load(BytesIO(share[:size].numpy().tobytes()), weights_only=True)
        for share, size in [*zip(shares or [], sizes, strict=False)][:: get_world_size() // get_data_parallel_size()]
    ]


class _File(Protocol):
    def write(self, columns: Columns) -> None: ...

    def close(self) -> None: ...


class _ParquetFile:
    """A Parquet file with a row group for each rank's part of a batch; multidimensional values are nested lists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def write(self, columns: Columns) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        table = pyarrow.table({name: _arrow(column) for name, column in columns.items()})
        if self._writer is None:
            self._writer = ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()


class _TensorFile:
    """A file with a dict of tensors by column, which `torch.load` reads with `weights_only=True`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._batches: list[Columns] = []

    def write(self, columns: Columns) -> None:
        before = self._batches[-1] if self._batches else columns
        for name, value in columns.items():
            if value.shape[1:] != before[name].shape[1:]:
                shapes = f"{tuple(before[name].shape[1:])} and {tuple(value.shape[1:])}"
                reason = f"samples of {name} have different shapes, {shapes}; give --format=parquet"
                raise WrongConfig(f"--format='pt': {reason}", "--format", fix="--format=parquet")
        self._batches.append(columns)

    def close(self) -> None:
        torch.save({name: torch.cat([batch[name] for batch in self._batches]) for name in self._batches[0]}, self._path)


def _arrow(tensor: Tensor) -> Any:
    """Return a tensor as a column of numbers, or of nested lists of numbers."""
    import numpy
    import pyarrow

    if tensor.is_floating_point() and tensor.itemsize < 4:
        tensor = tensor.float()  # numpy and Parquet do not support all small floating-point types of torch
    column = pyarrow.array(tensor.reshape(-1).numpy())
    for number, size in reversed([*enumerate(tensor.shape)][1:]):
        lists = tensor.shape[:number].numel()
        offsets = pyarrow.array(numpy.arange(lists + 1, dtype="int32") * size)
        column = pyarrow.ListArray.from_arrays(offsets, column)
    return column
