"""Ends runs whose ranks no longer train the same model."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from runner import Callback, Interval, Time

if TYPE_CHECKING:
    from torch import Tensor

    from runner import Logger, State

log = logging.getLogger("runner")

CHUNK = 1 << 20  # elements summed at a time, which takes 16 MB of extra memory
# Integer type by bytes per element. Wider elements are split: a product modulo 2^64 would lose the upper bits of 64.
INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int32", 16: "int32"}


class ReplicaMonitor(Callback):
    """Ends the run with an error when the parameters of its ranks are no longer bitwise equal.

    Replicas are equal by construction. Faulty memory, code that runs on some ranks only, or operations that differ
    between machines make them drift apart silently. Each rank computes a checksum of each parameter on its device, and
    the hosts exchange them: 8 bytes per parameter, with one wait for the device per comparison and none in between.
    Buffers are not compared, because each rank has its own running statistics of batch norm until an evaluation. For a
    sharded model, it compares ranks that hold the same shard (`trainer.shard_size`).

    Args:
        interval: time between two comparisons, as a time string or a number of epochs; 0 never compares.

    Raises:
        ValueError: `interval` is not a valid time.
        RuntimeError: in training, on all ranks, parameters differ; the message names the ranks, the first parameter and
            the batch.
    """

    def __init__(self, interval: str | int | Time = "100ba") -> None:
        self.interval = Interval(interval)
        self._multipliers: Tensor | None = None  # None if there is nothing to compare
        self._equal_at = 0

    def fit_start(self, state: State, logger: Logger) -> None:
        from runner.distributed.sharding import count_copies

        if count_copies(state.unwrapped_model) == 1:
            log.info("ReplicaMonitor: there are no replicas to compare, only one copy of the weights")
        elif self._multipliers is None:
            self._multipliers = make_multipliers().to(state.device)
            self._equal_at = state.timestamp.batch  # all ranks have just received the parameters of rank 0

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._multipliers is None:
            return
        if state.is_due(self.interval):
            self._compare(state, self._multipliers)

    epoch_end = batch_end

    def _compare(self, state: State, multipliers: Tensor) -> None:
        import torch
        import torch.distributed as dist

        from runner import get_world_size
        from runner.distributed.sharding import count_copies, local

        names, parameters = zip(*state.unwrapped_model.named_parameters(), strict=True)
        mine = checksums(map(local, parameters), multipliers).cpu()  # the intended host-device sync
        sums = [torch.empty_like(mine) for _ in range(get_world_size())]
        dist.all_gather(sums, mine)
        shards = torch.stack(sums).view(count_copies(state.unwrapped_model), -1, len(names))
        differing = (shards != shards[0]).flatten(0, 1)  # (ranks, parameters), the same on all ranks
        now = state.timestamp
        if differing.any():
            ranks = differing.any(dim=1).nonzero().flatten().tolist()
            columns = differing.any(dim=0).nonzero().flatten().tolist()
            raise RuntimeError(
                f"replicas have diverged: after batch {now.batch} (counted from 1), ranks {ranks} differ from the "
                f"first replica in {len(columns)} of {len(names)} parameters, starting with {names[columns[0]]!r}. "
                f"They were equal after batch {self._equal_at}: resume from a checkpoint of that batch or earlier"
            )
        self._equal_at = now.batch


def make_multipliers() -> Tensor:
    """Return the odd multipliers `(CHUNK,)`, int64, for `checksums`, which are the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator) | 1


def checksums(tensors: Iterable[Tensor], multipliers: Tensor) -> Tensor:
    """Return a checksum of the bits of each tensor, as int64 of shape `(tensors,)`, without waiting for the device.

    The bits of each element, as integers, are multiplied by a number for its position and summed modulo 2^64. Long
    tensors are summed in chunks, and the sums of the chunks in the same way. Because the multipliers are odd, a change
    of one element always changes the sum; changes of several cancel with a probability of at most 2^-32. The
    multipliers are from `make_multipliers`, on the device of the tensors.
    """
    import torch

    sums = []
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(getattr(torch, INTEGERS[tensor.element_size()]))
        chunks = torch.stack([(chunk * multipliers[: len(chunk)]).sum() for chunk in bits.split(CHUNK)])
        # Squared, because otherwise element i of chunk j would have the weight of element j of chunk i.
        sums.append((chunks * multipliers[: len(chunks)] ** 2).sum())
    return torch.stack(sums)
