"""An end to runs whose ranks do not train the same model any more."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from runner import Callback, Interval, Time

if TYPE_CHECKING:
    from torch import Tensor

    from runner import Logger, State

log = logging.getLogger("runner")

CHUNK = 1 << 20  # elements that are summed at a time: what it takes beside them is 16 MB
# By bytes of an element. Of 64 bits, a product modulo 2^64 would keep too little of the upper ones: they are halved.
INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int32", 16: "int32"}


class ReplicaMonitor(Callback):
    """Ends the run with an error when the parameters of its ranks are not equal to the bit.

    Replicas are equal by construction: faulty memory, code that runs on some ranks only, or operations that differ
    between machines make them drift apart, and nothing else tells. Each rank sums the bits of each parameter on its
    device, and the hosts exchange the sums: 8 bytes a parameter, one wait for the device at each comparison and none in
    between. Buffers are not compared: the running statistics of batch norm are each rank's own until an evaluation.

    Args:
        interval: from one comparison to the next: a time, or epochs as an int; 0: never.

    Raises:
        ValueError: `interval` is no time.
        RuntimeError: in training, on all ranks: parameters differ; the ranks, the first parameter and the batch are
            named.
    """

    def __init__(self, interval: str | int | Time = "100ba") -> None:
        self.interval = Interval(interval)
        self._multipliers: Tensor | None = None  # None: there is nothing to compare
        self._equal_at = 0

    def fit_start(self, state: State, logger: Logger) -> None:
        from runner import get_world_size

        if get_world_size() == 1:
            log.info("ReplicaMonitor: one process has no replicas to compare")
        elif self._multipliers is None:
            self._multipliers = make_multipliers().to(state.device)
            self._equal_at = state.timestamp.batch  # rank 0's parameters were given to all

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._multipliers is not None and state.is_due(self.interval):
            self._compare(state, self._multipliers)

    epoch_end = batch_end

    def _compare(self, state: State, multipliers: Tensor) -> None:
        import torch
        import torch.distributed as dist

        from runner import get_world_size

        names, parameters = zip(*state.unwrapped_model.named_parameters(), strict=True)
        mine = checksums(parameters, multipliers).cpu()  # the intended host-device sync
        sums = [torch.empty_like(mine) for _ in range(get_world_size())]
        dist.all_gather(sums, mine)
        differing = torch.stack(sums) != sums[0]  # (ranks, parameters), the same on all ranks
        now = state.timestamp
        if differing.any():
            which = differing.any(dim=0).nonzero().flatten().tolist()
            raise RuntimeError(
                f"replicas have diverged: after batch {now.batch} (from 1) the parameters of ranks "
                f"{differing.any(dim=1).nonzero().flatten().tolist()} differ from those of rank 0, {len(which)} of "
                f"{len(names)}, the first {names[which[0]]!r}. They were equal after batch {self._equal_at}: "
                "resume from a checkpoint of then or before"
            )
        self._equal_at = now.batch


def make_multipliers() -> Tensor:
    """Return the odd numbers `(CHUNK,)`, int64, that `checksums` multiplies by, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator) | 1


def checksums(tensors: Iterable[Tensor], multipliers: Tensor) -> Tensor:
    """Return a number `(tensors,)`, int64, for the bits of each tensor, on its device and without waiting for it.

    Each element's bits, as integers, are multiplied by a number of their own and summed, modulo 2^64; long tensors in
    chunks, whose sums are summed alike. As the numbers are odd, a change of one element always shows; changes of many
    cancel by chance only, once in 2^32 at the most.

    Args:
        tensors: of any dtype.
        multipliers: from `make_multipliers`, on the tensors' device.
    """
    import torch

    found = []
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(getattr(torch, INTEGERS[tensor.element_size()]))
        chunks = torch.stack([(chunk * multipliers[: len(chunk)]).sum() for chunk in bits.split(CHUNK)])
        # Squares: with the same numbers, element i of chunk j would weigh what element j of chunk i does.
        found.append((chunks * multipliers[: len(chunks)] ** 2).sum())
    return torch.stack(found)
