"""Language modelling on packed tokens in shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from runner.checks import check_whole
from runner.data.fake import FakeLoader, faked_by
from runner.data.shards.dataset import BatchedShards, ShardedDataset, ShardLoader
from runner.data.shards.formats import Tokens
from runner.data.shards.loading import CACHE, ShardOptions, fake_shard_loaders, open_shards, shard_loaders
from runner.data.text.windows import next_token
from runner.files.values import LocalPath


def _fake(context: int, **shared: Any) -> tuple[FakeLoader, ...]:
    options = ShardOptions(**shared)
    return fake_shard_loaders(_open(context, options), options, next_token)


@faked_by(_fake)
def load_token_shards(  # noqa: D417 (the others are described elsewhere)
    path: LocalPath | Sequence[LocalPath] = "data/tokens",
    eval_path: LocalPath | Sequence[LocalPath] | None = None,
    eval_shards: int = 1,
    test_path: LocalPath | Sequence[LocalPath] | None = None,
    context: int = 128,
    shuffle_shards: int = 8,
    cache_dir: LocalPath = CACHE,
    cache_gb: float = 50.0,
    batch_size: int = 8,
    eval_batch_size: int = 64,
    num_workers: int = 2,
    seed: int = 0,
) -> tuple[ShardLoader, ...]:
    """Return a training, an evaluation and perhaps a test loader over files of tokens, here or at addresses.

    A shard is a file of plain numbers in the byte order of this machine, whose name ends with their type: `.uint8`,
    `.uint16` or `.int32`, as numpy's `tofile` writes them, and as the cache of `load_text_files` keeps them.

    Batches are ``(inputs, targets)``, both int64 ``(N, context)``; the targets are the inputs one token later. Each
    shard is cut into windows, so that every token but its first is a target once an epoch; a rest shorter than a window
    is left out. Tokens travel to the device as they are stored.

    Args:
        context: window length, in tokens.

    For the other arguments see `load_parquet_shards`.

    Raises:
        OSError, ImportError, ValueError: the shards cannot be opened, see `open_shards`.
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
    return shard_loaders(_open(context, options), options, next_token)


def _open(context: int, options: ShardOptions) -> list[ShardedDataset]:
    check_whole("context", context, 1)
    return open_shards(options, Tokens(context), partial(BatchedShards, join=torch.cat, columns=["tokens"]))
