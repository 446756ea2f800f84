"""Two columns of tables in shards of parquet or arrow, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from runner.data.fake import FakeLoader, faked_by
from runner.data.hf.columns import checked_whole, image_tensor
from runner.data.images.imagefolder import normalized
from runner.data.seeded_batches import Transform
from runner.data.shards.dataset import BatchedShards, ShardedDataset, ShardLoader
from runner.data.shards.formats import Tables
from runner.data.shards.loading import CACHE, ShardOptions, fake_shard_loaders, open_shards, shard_loaders
from runner.failures.facts import wrong_argument
from runner.files.values import LocalPath
from runner.libraries.hugging_face import import_hf


def _fake(
    inputs: str, targets: str, classes: Sequence[str] | None, image_size: int | None, **shared: Any
) -> tuple[FakeLoader, ...]:
    options = ShardOptions(**shared)
    return fake_shard_loaders(*_open(inputs, targets, classes, image_size, options))


@faked_by(_fake)
def load_parquet_shards(
    path: LocalPath | Sequence[LocalPath] = "data/shards/*.parquet",
    eval_path: LocalPath | Sequence[LocalPath] | None = None,
    eval_shards: int = 1,
    test_path: LocalPath | Sequence[LocalPath] | None = None,
    inputs: str = "inputs",
    targets: str = "targets",
    classes: Sequence[str] | None = None,
    image_size: int | None = None,
    shuffle_shards: int = 8,
    cache_dir: LocalPath = CACHE,
    cache_gb: float = 50.0,
    batch_size: int = 64,
    eval_batch_size: int = 64,
    num_workers: int = 2,
    seed: int = 0,
) -> tuple[ShardLoader, ...]:
    """Return a training, an evaluation and perhaps a test loader over files of parquet or arrow, here or at addresses.

    Batches are `(inputs, targets)`: whole numbers and truth values become int64, other numbers float32, both `(N,)`;
    lists of equal length have further dimensions. Images, as bytes or as the library `datasets` stores them, become
    float32 `(N, 3, H, W)` as in `load_hf_dataset`.
    A shard is fetched when it is first needed, and decoded once into an uncompressed file in the cache, which is mapped
    into memory. The order is a `BlockOrder`: shards should hold samples of all kinds.

    Args:
        path: a file, a folder, a pattern with `*`, numbers as in `train-{000..127}.parquet`, or a list of these, here
            or at an address with a protocol of fsspec, such as s3://, gs:// and https://.
        eval_path: shards to evaluate on; None: the last of `path`.
        eval_shards: how many of `path` are for evaluation without an `eval_path`, at least 1.
        test_path: shards to test on; None: no test loader.
        inputs: a column of numbers, of lists of equal length, or of images.
        targets: a column of the same kinds, or of names of classes.
        classes: all class names in order, if targets are names.
        image_size: height and width of images, in pixels; None leaves them as they are.
        shuffle_shards: shards whose samples are mixed at a time, at least 1.
        cache_dir: folder for what was fetched and decoded, which processes and runs share.
        cache_gb: maximum size of the cache, in units of 10^9 bytes; the least recently used shards are evicted.
        batch_size: samples in a training batch, all ranks together.
        eval_batch_size: samples in an evaluation or test batch, all ranks together.
        num_workers: processes that read on each rank; 0 reads in this process.
        seed: seed of the order.

    Raises:
        OSError, ImportError, ValueError: see `open_shards`; or a column does not become tensors.
    """
    options = ShardOptions(
        path,
        eval_path,
        eval_shards,
        test_path,
        shuffle_shards,
        cache_dir,
        cache_gb,
        batch_size,
        eval_batch_size,
        num_workers,
        seed,
    )
    return shard_loaders(*_open(inputs, targets, classes, image_size, options))


def _open(
    inputs: str, targets: str, classes: Sequence[str] | None, image_size: int | None, options: ShardOptions
) -> tuple[list[ShardedDataset], ShardOptions, Transform | None]:
    """Return the samples, the options, and the function that converts images to float32, on the host or the device."""
    if image_size is not None and image_size < 1:
        raise wrong_argument("image_size", image_size, "must be at least 1 pixel")
    columns = {"inputs": inputs, "targets": targets}
    numbers = None if classes is None else {name: number for number, name in enumerate(classes)}
    decode = partial(decode_table, columns=columns, classes=numbers, image_size=image_size)
    join = import_hf("pyarrow").concat_tables
    make = partial(BatchedShards, join=join, decode=decode, columns=[*columns.values()])
    parts = open_shards(options, Tables([*columns.values()]), make)
    has_images = any("binary" in parts[0].columns[one] for one in columns.values())
    return parts, options, _normalize if has_images else None


def _normalize(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(normalized(one) if one.dtype == torch.uint8 else one for one in batch)


def decode_table(
    table: Any, columns: dict[str, str], classes: dict[str, int] | None, image_size: int | None
) -> tuple[Tensor, ...]:
    """Return columns of a `pyarrow.Table` as tensors `(rows, ...)`; images are uint8 `(rows, 3, H, W)`.

    `columns` are by the names of the arguments that chose them; `classes` are the numbers of targets that are names.

    Raises:
        ValueError: a column has no value in a row, lists of different length, or does not become a tensor.
    """
    found = []
    for key, name in columns.items():
        try:
            found.append(
                _tensor(table.column(name).combine_chunks(), classes if key == "targets" else None, image_size)
            )
        except (ValueError, TypeError, LookupError) as error:
            raise wrong_argument(key, name, str(error.args[0] if error.args else error)) from error
    return tuple(found)


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
    images = [image_tensor(one, image_size) for one in contents]
    if len(shapes := sorted({tuple(one.shape) for one in images})) > 1:
        raise ValueError(f"images have the shapes {shapes[0]} and {shapes[1]}; give image_size=<pixels>")
    return torch.stack(images)
