"""Work on files by all ranks: all get the results, or all get the error of one rank. Too slow for every batch."""

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
    """Return a group of all ranks for another thread, which keeps its messages apart from training's. All ranks."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, sent as JSON, so that nothing is unpickled. All ranks."""
    if get_world_size() == 1:
        return [value]
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
    longest = int(max(sizes))
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, pad(content, (0, longest - len(content))), group=group)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)]


def do_together(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call a function on each rank, and return the results of all ranks. All ranks.

    Raises:
        OSError: the function raised one on this rank, or else on another rank, which the message names.
    """
    failure: OSError | None = None
    own: dict[str, Any] = {}
    try:
        own["result"] = function()
    except OSError as error:
        failure = error
        own["error"] = [error.errno or errno.EIO, f"{error.strerror or error} (rank {get_global_rank()})"]
    outcomes = gather_objects(own, group)
    if failure is not None:
        raise failure
    for outcome in outcomes:
        if "error" in outcome:
            raise OSError(*outcome["error"])
    return [outcome["result"] for outcome in outcomes]
