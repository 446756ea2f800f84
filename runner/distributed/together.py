"""Work on files that ranks do together: all ranks get the result, or all get the error of one. Not for each batch."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from runner.distributed.ranks import get_global_rank, get_world_size
from runner.distributed.store import TIMEOUT

T = TypeVar("T")


def make_group() -> Any:
    """Return a group of all ranks for another thread, so that its messages do not mix with training's. All ranks."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, on all ranks. All ranks; the values travel as JSON, so nothing is unpickled."""
    if get_world_size() == 1:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    longest = int(max(sizes))
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, pad(mine, (0, longest - len(mine))), group=group)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)]


def do_together(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call a function on each rank, and return the results of all ranks. All ranks.

    Raises:
        OSError: it raised one on this rank or, where it did not, on another, which the message names.
    """
    failure: OSError | None = None
    mine: dict[str, Any] = {}
    try:
        mine["result"] = function()
    except OSError as error:
        failure = error
        mine["error"] = [error.errno or errno.EIO, f"{error.strerror or error} (rank {get_global_rank()})"]
    found = gather_objects(mine, group)
    if failure is not None:
        raise failure
    for one in found:
        if "error" in one:
            raise OSError(*one["error"])
    return [one["result"] for one in found]
