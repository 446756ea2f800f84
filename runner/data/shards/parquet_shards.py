"""Two columns of tables in parquet or arrow shards, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from runner.data.fake import data_function
from runner.data.hf.columns import checked_whole, image_tensor
from runner.data.images.normalization import IMAGENET
from runner.data.seeded_batches import Transform
from runner.data.shards.dataset import BatchedShards, ShardedDataset
from runner.data.shards.formats import Tables
from runner.data.shards.loading import ShardArguments
from runner.failures.checks import check_whole
from runner.failures.errors import wrong_argument
from runner.files.values import LocalPaths
from runner.libraries.hugging_face import import_hf


@dataclass(frozen=True)
class ParquetShards(ShardArguments):
    """Return a training, an evaluation and perhaps a test loader over parquet or arrow files, local or remote.

    Batches are `(inputs, targets)`: integers and booleans become int64, other numbers float32, both `(N,)`; lists of
    equal length add dimensions. Images, as bytes or as the library `datasets` stores them, become float32
    `(N, 3, H, W)` as in `load_hf_dataset`.

    A shard is fetched when it is first needed, and decoded once into an uncompressed file in the cache, which is mapped
    into memory. The order is a `BlockOrder`, so each shard should hold samples of all kinds.

    Args:
        inputs: a column of numbers, of lists of equal length, or of images.
        targets: a column of the same kinds, or of class names.
        classes: all class names in order, if targets are class names.
        image_size: height and width of images, in pixels; None leaves them as they are.

    For the other arguments and the exceptions see `ShardArguments`. A ValueError is also raised if a column cannot
    become tensors.
    """

    path: LocalPaths = "data/shards/*.parquet"
    _: KW_ONLY
    inputs: str = "inputs"
    targets: str = "targets"
    classes: Sequence[str] | None = None
    image_size: int | None = None

    def open(self) -> tuple[list[ShardedDataset], Transform | None]:
        check_whole("image_size", self.image_size, 1, "a number of pixels", none="images as they are")
        columns = {"inputs": self.inputs, "targets": self.targets}
        numbers = None if self.classes is None else {name: number for number, name in enumerate(self.classes)}
        decode = partial(decode_table, columns=columns, classes=numbers, image_size=self.image_size)
        join = import_hf("pyarrow").concat_tables
        make = partial(BatchedShards, join=join, decode=decode, columns=[*columns.values()])
        parts = self.open_shards(Tables([*columns.values()]), make)
        has_images = any("binary" in parts[0].columns[column] for column in columns.values())
        return parts, IMAGENET if has_images else None


load_parquet_shards = data_function("load_parquet_shards", ParquetShards)


def decode_table(
    table: Any, columns: dict[str, str], classes: dict[str, int] | None, image_size: int | None
) -> tuple[Tensor, ...]:
    """Return columns of a `pyarrow.Table` as tensors `(rows, ...)`; images are uint8 `(rows, 3, H, W)`.

    `columns` maps the names of arguments to columns; `classes` maps class names to numbers, for targets.
    """
    tensors = []
    for key, name in columns.items():
        values = table.column(name).combine_chunks()
        try:
            tensors.append(_tensor(values, classes if key == "targets" else None, image_size))
        except (ValueError, TypeError, LookupError) as error:
            raise wrong_argument(key, name, str(error.args[0] if error.args else error)) from error
    return tuple(tensors)


def _tensor(values: Any, classes: dict[str, int] | None, image_size: int | None) -> Tensor:
    types = import_hf("pyarrow").types
    kind = values.type
    if values.null_count:
        raise ValueError("some rows have no value; fill them in, or leave the rows out")
    if types.is_dictionary(kind):
        return _tensor(values.dictionary_decode(), classes, image_size)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _tensor(values.flatten(), classes, image_size)
        lengths = import_hf("pyarrow.compute").list_value_length(values).unique().to_pylist()
        if len(lengths) > 1:
            raise ValueError(f"lists have {min(lengths)} to {max(lengths)} entries; must be equal in a batch")
        return inner.unflatten(0, (len(values), lengths[0]))
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return _tensor(values.field("bytes"), classes, image_size)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return _images(values.to_pylist(), image_size)
    if types.is_string(kind) or types.is_large_string(kind):
        if classes is None:
            raise ValueError("holds texts; if they are names of classes, give targets and classes=[<name>, ...]")
        return torch.tensor([_class(name, classes) for name in values.to_pylist()])
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise ValueError(f"holds {kind}; must be numbers, lists of them, names of classes or images")
    array = values.to_numpy(zero_copy_only=False)
    return torch.from_numpy(checked_whole(array).astype(numpy.float32 if types.is_floating(kind) else numpy.int64))


def _class(name: str, classes: dict[str, int]) -> int:
    if name not in classes:
        raise ValueError(f"classes lacks {name!r}, which a row has; add it")
    return classes[name]


def _images(contents: Sequence[bytes], image_size: int | None) -> Tensor:
    images = [image_tensor(content, image_size) for content in contents]
    if len(shapes := sorted({tuple(image.shape) for image in images})) > 1:
        raise ValueError(f"images have the shapes {shapes[0]} and {shapes[1]}; give image_size=<pixels>")
    return torch.stack(images)
