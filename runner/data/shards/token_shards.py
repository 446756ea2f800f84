"""Language modeling on packed tokens in shards."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial

import torch

from runner.data.fake import data_function
from runner.data.seeded_batches import Transform
from runner.data.shards.dataset import BatchedShards, ShardedDataset
from runner.data.shards.formats import Tokens
from runner.data.shards.loading import ShardArguments
from runner.data.text.windows import next_token
from runner.failures.checks import check_whole
from runner.files.values import LocalPaths


@dataclass(frozen=True)
class TokenShards(ShardArguments):
    """Return a training, an evaluation and perhaps a test loader over files of tokens, local or remote.

    A shard is a file of plain numbers in the byte order of this machine, as numpy's `tofile` writes them and the cache
    of `load_text_files` keeps them. Its name ends with their type: `.uint8`, `.uint16` or `.int32`.

    Batches are `(inputs, targets)`, both int64 `(N, context)`; the targets are the inputs shifted by one token. Each
    shard is cut into windows, so that every token but its first is a target once an epoch; an incomplete last window is
    left out. Tokens are copied to the device in their stored type.

    Args:
        context: window length, in tokens.

    For the other arguments and the exceptions see `ShardArguments`.
    """

    path: LocalPaths = "data/tokens"
    _: KW_ONLY
    context: int = 128
    batch_size: int = 8

    def open(self) -> tuple[list[ShardedDataset], Transform]:
        check_whole("context", self.context, 1)
        make = partial(BatchedShards, join=torch.cat, columns=["tokens"])
        return self.open_shards(Tokens(self.context), make), next_token


load_token_shards = data_function("load_token_shards", TokenShards)
