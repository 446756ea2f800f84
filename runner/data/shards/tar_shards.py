"""Samples in tar files in the layout of WebDataset: images or arrays, each with a class or another target."""

from __future__ import annotations

import io
import json
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy
import torch
from torch import Tensor

from runner.data.fake import data_function
from runner.data.hf.columns import checked_whole
from runner.data.images.decoding import SUFFIXES, open_image
from runner.data.images.imagefolder import check_image_sizes, image_transforms
from runner.data.images.normalization import IMAGENET
from runner.data.seeded_batches import Transform
from runner.data.shards.dataset import ShardedDataset
from runner.data.shards.formats import Tars
from runner.data.shards.loading import ShardArguments
from runner.failures.errors import wrong_argument
from runner.files.printable import printable
from runner.files.values import LocalPaths

NUMBERS = (".cls", ".index", ".json")


@dataclass(frozen=True)
class TarShards(ShardArguments):
    """Return a training, an evaluation and perhaps a test loader over tar files, local or remote.

    A sample is a sequence of adjacent files whose names are equal up to the first dot; the rest of a name is a field:
    `0007.jpg` and `0007.cls` are the fields `jpg` and `cls`. Batches are `(inputs, targets)`: images become float32
    `(N, 3, size, size)` as in `load_imagefolder`, with its random augmentation in training; numpy arrays (`.npy`) and
    numbers and lists in `.json` become float32 or int64 `(N, ...)`, and `.cls` and `.index` int64 `(N,)`.

    A remote tar file is fetched when it is first needed, and again only after it was evicted. Its index is kept; making
    it needs the whole file, so the first start fetches each shard once.

    Args:
        inputs: the field to learn from, such as jpg, png or npy.
        targets: the field to learn, such as cls.
        image_size: height and width of training images, in pixels.
        eval_image_size: height and width of evaluation and test images, in pixels.

    For the other arguments and the exceptions see `ShardArguments`. A ValueError is also raised if a size is below 1,
    or a field cannot be decoded.
    """

    path: LocalPaths = "data/shards/*.tar"
    _: KW_ONLY
    inputs: str = "jpg"
    targets: str = "cls"
    image_size: int = 224
    eval_image_size: int = 224
    batch_size: int = 256
    eval_batch_size: int = 256
    num_workers: int = 8

    def open(self) -> tuple[list[ShardedDataset], Transform | None]:
        check_image_sizes(self.image_size, self.eval_image_size)
        is_image = _suffix(self.inputs) in SUFFIXES
        for key, field, is_known in (("inputs", self.inputs, is_image), ("targets", self.targets, False)):
            if not is_known and _suffix(field) not in (".npy", *NUMBERS):
                suffixes = (*(sorted(SUFFIXES) if key == "inputs" else ()), ".npy", *NUMBERS)
                known = ", ".join(suffix[1:] for suffix in suffixes)
                raise wrong_argument(key, field, f"must be a field that ends with one of {known}")
        random_crop, center_crop = image_transforms(self.image_size, self.eval_image_size) if is_image else (None, None)

        def make(*args: Any, key: str) -> ShardedDataset:
            image = random_crop if key == "path" else center_crop
            decode = partial(decode_sample, inputs=self.inputs, targets=self.targets, image=image)
            return ShardedDataset(*args, decode=decode, columns=(self.inputs, self.targets), key=key)

        return self.open_shards(Tars(), make), IMAGENET if is_image else None


load_tar_shards = data_function("load_tar_shards", TarShards)


def decode_sample(sample: tuple[str, dict[str, bytes]], inputs: str, targets: str, image: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a sample as tensors.

    `sample` is its name and the content of its files by field; `image` makes a tensor of a Pillow image.
    """
    name, contents = sample
    tensors = []
    for field in (inputs, targets):
        shown = f"member {printable(name)}.{field}"
        try:
            tensors.append(_decode(_suffix(field), contents[field], image, shown))
        except (ValueError, OSError, TypeError, RuntimeError, OverflowError, EOFError, MemoryError) as error:
            reason = printable(" ".join(str(error).split())).removeprefix(f"{shown}: ")
            raise ValueError(f"{shown}: {reason}") from error
    return tensors[0], tensors[1]


def _decode(suffix: str, content: bytes, image: Any, shown: str) -> Tensor:
    if suffix in SUFFIXES:
        return image(open_image(content, shown))
    if suffix == ".npy":
        array = numpy.load(io.BytesIO(content), allow_pickle=False)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"it holds {array.dtype}; must be numbers")
        values = torch.from_numpy(checked_whole(array))
    else:
        values = torch.tensor(json.loads(content))
    return values.float() if values.is_floating_point() else values.long()


def _suffix(field: str) -> str:
    return PurePosixPath(f"x.{field}").suffix
