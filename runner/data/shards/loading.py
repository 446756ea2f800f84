"""From the arguments that all data in shards share to loaders of it, and to stand-ins for those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.batch import map_tensors
from runner.checks import check_whole
from runner.data.fake import FakeLoader
from runner.data.seeded_batches import Transform
from runner.data.shards.cache import ShardCache
from runner.data.shards.dataset import ShardedDataset, ShardLoader
from runner.data.shards.files import ShardFile, find_shards
from runner.data.shards.formats import Format
from runner.failures.facts import wrong_argument

CACHE = "~/.cache/exactrun/shards"
SHOWN = 16  # samples that a stand-in looks at

MakeDataset = Callable[..., ShardedDataset]
"""``make(files, form, cache, mixed, key=...)`` -> the samples of some shards."""


class ShardOptions(NamedTuple):
    """The arguments that all data in shards share; `load_parquet_shards` describes them."""

    path: str | Sequence[str]
    eval_path: str | Sequence[str] | None
    eval_shards: int
    test_path: str | Sequence[str] | None
    shuffle_shards: int
    cache_dir: str
    cache_gb: float
    batch_size: int
    eval_batch_size: int
    num_workers: int
    seed: int


def open_shards(options: ShardOptions, form: Format, make: MakeDataset) -> list[ShardedDataset]:
    """Return the samples to train and to evaluate on and, if there are shards of them, to test on.

    Raises:
        FileNotFoundError: there are no shards.
        ImportError: the library for the protocol of an address is not installed.
        ConnectionError: a server fails in every attempt.
        OSError: the folder of the cache cannot be written to.
        ValueError: an argument is out of range; a shard is torn, empty, or unlike the others.
    """
    check_whole("shuffle_shards", options.shuffle_shards, 1)
    check_whole("eval_shards", options.eval_shards, 1)
    given = {"path": options.path, "eval_path": options.eval_path, "test_path": options.test_path}
    found = {key: find_shards(one, form.suffixes, key) for key, one in given.items() if one is not None}
    cache = ShardCache(options.cache_dir, options.cache_gb)
    if options.eval_path is None:
        train = found["path"][: -options.eval_shards]
        kept = found["path"][-options.eval_shards :]
        if not train:
            reason = f"there are {len(kept)} shards in total, so none is left to train on; set eval_path, or add shards"
            raise wrong_argument("eval_shards", options.eval_shards, reason)
        found = {"path": train, "eval_path": kept, **{key: one for key, one in found.items() if key == "test_path"}}
    _refuse_shared(found)
    return [make(files, form, cache, options.shuffle_shards, key=key) for key, files in found.items()]


def shard_loaders(
    parts: Sequence[ShardedDataset], options: ShardOptions, transform: Transform | None = None
) -> tuple[ShardLoader, ...]:
    """Return a training, an evaluation and perhaps a test loader for the result of `open_shards`."""
    train, *others = parts
    shared: dict[str, Any] = {"num_workers": options.num_workers, "transform": transform}
    return (
        ShardLoader(train, options.batch_size, shuffle=True, seed=options.seed, **shared),
        *(ShardLoader(one, options.eval_batch_size, shuffle=False, **shared) for one in others),
    )


def fake_shard_loaders(
    parts: Sequence[ShardedDataset], options: ShardOptions, transform: Transform | None = None
) -> tuple[FakeLoader, ...]:
    """Return stand-ins for the loaders of `shard_loaders`, made from the first samples, with the largest whole numbers.

    Of data at an address they fetch one shard.
    """
    alone = options._replace(num_workers=0)
    (loader,) = shard_loaders(parts[:1], alone, transform)
    batch = loader.pick(torch.arange(min(SHOWN, len(parts[0]))))

    def make(samples: int) -> Any:
        def like(tensor: Tensor) -> Tensor:
            one = tensor[:1] if tensor.is_floating_point() else tensor.max().expand(1, *tensor.shape[1:])
            return one.expand(samples, *tensor.shape[1:]).clone()

        return map_tensors(batch, like)

    train, *others = parts
    return (
        FakeLoader(make, len(train), options.batch_size),
        *(FakeLoader(make, len(one), options.eval_batch_size) for one in others),
    )


def _refuse_shared(found: dict[str, list[ShardFile]]) -> None:
    trained = {*found["path"]}
    for key, files in found.items():
        if key != "path" and (both := [one for one in files if one in trained]):
            raise wrong_argument(key, both[0].shown.strip("'"), "is among the shards of path; give others")
