"""Make loaders of data in shards, real ones and ones with made-up batches, from the arguments common to all formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from runner.data.fake import FakeLoader
from runner.data.seeded_batches import Transform
from runner.data.shards.cache import ShardCache
from runner.data.shards.dataset import ShardedDataset, ShardLoader
from runner.data.shards.files import ShardFile, find_shards
from runner.data.shards.formats import Format
from runner.device.batch import map_tensors
from runner.failures.checks import check_whole
from runner.failures.errors import wrong_argument
from runner.files.values import LocalPath, LocalPaths

SHOWN = 16  # samples that made-up batches are based on

MakeDataset = Callable[..., ShardedDataset]
"""`make(files, form, cache, mixed, key=...)` returns the samples of some shards."""


@dataclass(frozen=True)
class ShardArguments(ABC):
    """The arguments that all data in shards share.

    Args:
        path: a file, a folder, a pattern with `*`, a range as in `train-{000..127}.parquet`, or a list of these; local,
            or at an address with a protocol of fsspec, such as s3://, gs:// and https://.
        eval_path: shards to evaluate on; None: the last shards of `path`.
        eval_shards: number of shards of `path` to evaluate on without an `eval_path`, at least 1.
        test_path: shards to test on; None: no test loader.
        shuffle_shards: number of shards whose samples are mixed at a time, at least 1.
        cache_dir: folder for fetched and decoded shards, shared by processes and runs.
        cache_gb: maximum size of the cache, in units of 10^9 bytes; the least recently used shards are evicted.
        batch_size: samples in a training batch, all ranks together.
        eval_batch_size: samples in an evaluation or test batch, all ranks together.
        num_workers: processes that read on each rank; 0 reads in this process.
        seed: seed of the order.

    Raises:
        FileNotFoundError: there are no shards.
        ImportError: the library for the protocol of an address is not installed.
        ConnectionError: a server fails in every attempt.
        OSError: the folder of the cache cannot be written to.
        ValueError: an argument is out of range; a shard is torn, empty, or unlike the others.
    """

    path: LocalPaths
    eval_path: LocalPaths | None = None
    eval_shards: int = 1
    test_path: LocalPaths | None = None
    _: KW_ONLY
    shuffle_shards: int = 8
    cache_dir: LocalPath = "~/.cache/exactrun/shards"
    cache_gb: float = 50.0
    batch_size: int = 64
    eval_batch_size: int = 64
    num_workers: int = 2
    seed: int = 0

    @abstractmethod
    def open(self) -> tuple[list[ShardedDataset], Transform | None]:
        """Return the samples, see `open_shards`, and the transform of their batches."""

    def open_shards(self, form: Format, make: MakeDataset) -> list[ShardedDataset]:
        """Return the samples to train and to evaluate on and, with a `test_path`, to test on."""
        check_whole("shuffle_shards", self.shuffle_shards, 1)
        check_whole("eval_shards", self.eval_shards, 1)
        arguments = {"path": self.path, "eval_path": self.eval_path, "test_path": self.test_path}
        files = {key: find_shards(path, form.suffixes, key) for key, path in arguments.items() if path is not None}
        cache = ShardCache(self.cache_dir, self.cache_gb)
        if self.eval_path is None:
            train = files["path"][: -self.eval_shards]
            evaluation = files["path"][-self.eval_shards :]
            if not train:
                total = f"there are {len(evaluation)} shards in total"
                reason = f"{total}, so none is left to train on; set eval_path, or add shards"
                raise wrong_argument("eval_shards", self.eval_shards, reason)
            files |= {"path": train, "eval_path": evaluation}
        _refuse_shared(files)
        keys = [key for key in arguments if key in files]  # in the order of the loaders
        return [make(files[key], form, cache, self.shuffle_shards, key=key) for key in keys]

    def load(self) -> tuple[ShardLoader, ...]:
        """Return a training, an evaluation and perhaps a test loader."""
        (train, *held_out), transform = self.open()
        shared: dict[str, Any] = {"num_workers": self.num_workers, "transform": transform}
        return (
            ShardLoader(train, self.batch_size, shuffle=True, seed=self.seed, **shared),
            *(ShardLoader(part, self.eval_batch_size, shuffle=False, **shared) for part in held_out),
        )

    def fake(self) -> tuple[FakeLoader, ...]:
        """Return loaders of made-up batches, based on the first samples and with the largest of their integers.

        For remote data this fetches one shard.
        """
        (train, *held_out), transform = self.open()
        loader = ShardLoader(train, self.batch_size, shuffle=True, seed=self.seed)
        batch = loader.pick(torch.arange(min(SHOWN, len(train))))

        def make(samples: int) -> Any:
            def like(tensor: Tensor) -> Tensor:
                is_first = tensor.is_floating_point() or tensor.dtype == torch.uint8  # pixels
                sample = tensor[:1] if is_first else tensor.max().expand(1, *tensor.shape[1:])
                return sample.expand(samples, *tensor.shape[1:]).clone()

            return map_tensors(batch, like)

        return (
            FakeLoader(make, len(train), self.batch_size, transform),
            *(FakeLoader(make, len(part), self.eval_batch_size, transform) for part in held_out),
        )


def _refuse_shared(files: dict[str, list[ShardFile]]) -> None:
    training = {*files["path"]}
    for key, held_out in files.items():
        if key != "path" and (shared := [file for file in held_out if file in training]):
            raise wrong_argument(key, shared[0].shown.strip("'"), "is among the shards of path; give others")
