"""The shares of ranks: which loaders give each its own, how ranks read them, and whether all samples weigh alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from typing import Any, Literal, NamedTuple, get_args

import torch

from runner.distributed.collectives import all_reduce_sum
from runner.distributed.ranks import get_data_parallel_rank, get_data_parallel_size
from runner.failures.checks import name_of_loader

_REMEDY = "use runner.data.DatasetLoader(dataset, batch_size=<samples over all ranks>), which shards exactly"

Reading = Literal["shares", "everything"]
"""What a loader yields on each rank: 'shares' are only that rank's samples, 'everything' is the same on all ranks."""


class Share(NamedTuple):
    """This rank's part of a batch of all ranks."""

    batch: Any
    samples: int
    """Samples on this rank; 0 if `batch` only stands in for an empty share."""
    all_samples: int
    """Samples on all ranks."""


def refuse_unsharded(loader: Any, label: str, world_size: int, tensor_parallel: int = 1) -> None:
    """Refuse a loader that may give all ranks the same samples, or pads an evaluation with copies.

    What a loader reads on each rank must be declared: by this project's `order`, by an attribute `ranks_read`, or by a
    sampler with torch's `num_replicas`. `world_size` ranks see different samples, and `tensor_parallel` ranks the same
    ones. Call it on all ranks, or in a single process on behalf of `world_size` ranks.
    """
    name = name_of_loader(label)
    reading = getattr(loader, "ranks_read", None)
    if reading not in (None, *get_args(Reading)):
        raise ValueError(f"{name}: ranks_read={reading!r}: must be one of {', '.join(map(repr, get_args(Reading)))}")
    if reading == "everything" and label == "train":
        raise ValueError(f"{name}: Replicated is for evaluation, where each batch counts on one rank only; {_REMEDY}")
    if tensor_parallel > 1 and not hasattr(loader, "order") and reading != "everything":
        raise ValueError(f"{name}: {tensor_parallel} ranks must see the same samples (tensor_parallel); {_REMEDY}")
    if hasattr(loader, "order") or world_size == 1:
        return
    dividing = next((one for one in _samplers(loader) if hasattr(one, "num_replicas")), None)
    if dividing is None and reading is None:
        others = "runner.data.Sharded(loader) if each rank reads its own samples"
        others += "" if label == "train" else ", or runner.data.Replicated(loader) if each may read all of them"
        raise ValueError(
            f"{name}: nothing says how {world_size} ranks divide this {type(loader).__name__}, and each may read the "
            f"same samples; {_REMEDY}; or {others}"
        )
    if dividing is not None:
        if reading == "everything":
            raise ValueError(f"{name}: Replicated reads all samples on each rank, but its sampler divides them")
        _check_division(dividing, name, label, world_size)


def _check_division(sampler: Any, name: str, label: str, world_size: int) -> None:
    """Raise ValueError unless a sampler that divides its samples gives each to one of `world_size` ranks."""
    kind = type(sampler).__name__
    if torch.distributed.is_initialized():  # otherwise a single process checks on behalf of the ranks
        ranks = _gather(getattr(sampler, "rank", get_data_parallel_rank()))
        if sampler.num_replicas != world_size or sorted(ranks) != [*range(world_size)]:
            raise ValueError(
                f"{name}: {kind} divides the samples by num_replicas={sampler.num_replicas!r}, and {world_size} ranks "
                f"read parts {ranks}: each must read its own; {_REMEDY}"
            )
    if label != "train" and isinstance(sampler, torch.utils.data.DistributedSampler):
        size = len(sampler.dataset)  # type: ignore[arg-type]
        if size % world_size:
            raise ValueError(
                f"{name}: {kind} repeats samples, as {size} cannot be divided by {world_size} ranks; {_REMEDY}"
            )


def find_sampler(loader: Any) -> Any:
    """Return the sampler that decides which samples a torch DataLoader reads; None if unknown."""
    # Given a batch_sampler, torch sets loader.sampler to a default that it never uses.
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader if batch_sampler is None else batch_sampler, "sampler", None)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader, or the sampler in it that decides its order, the epoch, if it has a method `set_epoch`."""
    shuffling = next((one for one in (*_samplers(loader), loader) if hasattr(one, "set_epoch")), None)
    if shuffling is not None:
        shuffling.set_epoch(epoch)


def _samplers(loader: Any) -> tuple[Any, Any]:
    return find_sampler(loader), getattr(loader, "batch_sampler", None)


def read_shares(
    reading: Reading, batches: Iterator[Any], num_samples: Callable[[Any], int], name: str
) -> Iterator[Share]:
    """Return an iterator over this rank's batches, as many as on every other rank. All ranks.

    `name` is what users call the loader.
    """
    if reading == "everything":
        return _in_turn(batches, num_samples, get_data_parallel_rank(), get_data_parallel_size())
    return _in_step(batches, num_samples, name)


def length_of(loader: Any) -> int | None:
    """Return how many batches a loader has; None if it does not know."""
    try:
        return len(loader)
    except TypeError:
        return None


def length_of_shares(reading: Reading, length: int | None, name: str) -> int | None:
    """Return how many batches each rank has, given the length of its own loader; None if any is unknown. All ranks."""
    lengths = _gather(-1 if length is None else length)
    if reading == "shares" and any(lengths):
        _refuse_empty(lengths, 0, name)
    if min(lengths) < 0:
        return None
    return -(-max(lengths) // len(lengths)) if reading == "everything" else max(lengths)


def is_empty(loader: Any) -> bool:
    """Return whether a loader without a length yields no batch; False for an iterator, which would lose its first."""
    if length_of(loader) is not None or hasattr(loader, "__next__"):
        return False
    with torch.random.fork_rng(devices=()):  # reading may draw random numbers
        return not any(True for _ in loader)


def _refuse_empty(numbers: list[int], empty: int, name: str) -> None:
    """Raise ValueError if the number of a rank says that it has no batch."""
    if empty in numbers:
        rank = numbers.index(empty)
        raise ValueError(f"{name}: the share of rank {rank} has no batch: each rank needs at least one")


_CHANGE_BATCHES = "after_dataloader", "batch_start", "before_train_batch"  # the events at which algorithms may


def weigh_alike(state: Any, listeners: Callable[[str], list[Any]]) -> bool:
    """Return whether all training samples have the same weight in the loss: ranks then know each other's weights.

    So it is unless the model counts something else, see `Model.loss_averages`. It is also so if the loader declares
    `equal_targets`: each sample has the same number of targets, and none is left out. This holds for a `loss_weight`
    marked as `counts_targets`, of batches that no algorithm may change. The answer is the same on all ranks.
    """
    if state.unwrapped_model.loss_averages != "weights":
        return True
    weight = type(state.unwrapped_model).loss_weight
    acting = {id(one) for event in _CHANGE_BATCHES for one in listeners(event)}
    is_declared = getattr(state.train_dataloader, "equal_targets", False) and getattr(weight, "counts_targets", False)
    return is_declared and acting.isdisjoint(map(id, state.algorithms))


def _in_turn(batches: Iterator[Any], num_samples: Callable[[Any], int], rank: int, ranks: int) -> Iterator[Share]:
    """Yield every batch on one rank only; all ranks read all batches, so no rank has to ask another."""
    while several := [*islice(batches, ranks)]:
        counts = [num_samples(one) for one in several]
        has_one = rank < len(several)
        yield Share(several[rank if has_one else 0], counts[rank] if has_one else 0, sum(counts))


_END = object()


def _in_step(batches: Iterator[Any], num_samples: Callable[[Any], int], name: str) -> Iterator[Share]:
    """Yield this rank's batches until no rank has any left; a rank that has run out sees its last one again.

    Ranks agree on each batch with one sum, on the host, because only they know how many samples they have.
    """
    last: Any = _END
    for batch in chain(batches, repeat(_END)):
        counts = _gather(-1 if batch is _END else num_samples(batch))
        if max(counts) < 0:
            return
        if last is _END:
            _refuse_empty(counts, -1, name)
        last = last if batch is _END else batch
        yield Share(last, max(0, counts[get_data_parallel_rank()]), sum(one for one in counts if one > 0))


def _gather(number: int) -> list[int]:
    """Return every rank's number, in the order of ranks. All ranks, on the host."""
    numbers = torch.zeros(get_data_parallel_size(), dtype=torch.int64)
    numbers[get_data_parallel_rank()] = number
    return all_reduce_sum(numbers).tolist()
