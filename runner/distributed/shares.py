"""How ranks share the batches of a loader, and whether all samples have the same weight in the loss."""

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
"""The batches of a loader on each rank: 'shares' are that rank's samples, 'everything' is the same on all ranks."""


class Share(NamedTuple):
    """This rank's part of a batch of all ranks."""

    batch: Any
    samples: int
    """Samples on this rank; 0 if `batch` only stands in for an empty share."""
    all_samples: int
    """Samples on all ranks."""


def refuse_unsharded(loader: Any, label: str, world_size: int, tensor_parallel: int = 1) -> None:
    """Refuse a loader that may give all ranks the same samples, or pads an evaluation with copies.

    A loader must declare what it reads on each rank: by the attribute `order` of this project's loaders, by its
    `ranks_read`, or by a sampler with torch's `num_replicas`. `world_size` ranks see different samples, and
    `tensor_parallel` ranks the same ones. Call it on all ranks, or in a single process on behalf of `world_size` ranks.
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
    dividing_sampler = next((sampler for sampler in _samplers(loader) if hasattr(sampler, "num_replicas")), None)
    if dividing_sampler is None and reading is None:
        wrappers = "runner.data.Sharded(loader) if each rank reads its own samples"
        wrappers += "" if label == "train" else ", or runner.data.Replicated(loader) if each may read all of them"
        raise ValueError(
            f"{name}: nothing says how {world_size} ranks divide this {type(loader).__name__}, and each may read the "
            f"same samples; {_REMEDY}; or {wrappers}"
        )
    if dividing_sampler is not None:
        if reading == "everything":
            raise ValueError(f"{name}: Replicated reads all samples on each rank, but its sampler divides them")
        _check_division(dividing_sampler, name, label, world_size)


def _check_division(sampler: Any, name: str, label: str, world_size: int) -> None:
    """Raise ValueError unless a sampler gives each sample to exactly one of `world_size` ranks."""
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
    """Set the epoch of the sampler that decides a loader's order, or of the loader, if it has a method `set_epoch`."""
    shuffler = next((source for source in (*_samplers(loader), loader) if hasattr(source, "set_epoch")), None)
    if shuffler is not None:
        shuffler.set_epoch(epoch)


def _samplers(loader: Any) -> tuple[Any, Any]:
    return find_sampler(loader), getattr(loader, "batch_sampler", None)


def read_shares(
    reading: Reading, batches: Iterator[Any], num_samples: Callable[[Any], int], name: str, loader: Any = None
) -> Iterator[Share]:
    """Return an iterator over this rank's batches, the same number on every rank. All ranks.

    `name` is the loader's name for users. A rank that resumes after its last batch repeats the loader's `last`.
    """
    if reading == "everything":
        return _in_turn(batches, num_samples, get_data_parallel_rank(), get_data_parallel_size())
    return _in_step(batches, num_samples, name, loader)


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader; None if it has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


def length_of_shares(reading: Reading, length: int | None, name: str) -> int | None:
    """Return the number of batches of each rank, given its loader's length; None if one is unknown. All ranks."""
    lengths = _gather(-1 if length is None else length)
    if reading == "shares" and any(lengths):
        _refuse_empty(lengths, 0, name)
    if min(lengths) < 0:
        return None
    return -(-max(lengths) // len(lengths)) if reading == "everything" else max(lengths)


def is_empty(loader: Any) -> bool:
    """Return whether a loader without a length is empty; False for an iterator, which would lose its first batch."""
    if length_of(loader) is not None or hasattr(loader, "__next__"):
        return False
    with torch.random.fork_rng(devices=()):  # reading may draw random numbers
        return not any(True for _ in loader)


def _refuse_empty(numbers: list[int], empty: int, name: str) -> None:
    """Raise ValueError if a rank has no batch: its number equals `empty`."""
    if empty in numbers:
        rank = numbers.index(empty)
        raise ValueError(f"{name}: the share of rank {rank} has no batch: each rank needs at least one")


_CHANGE_BATCHES = "after_dataloader", "batch_start", "before_train_batch"  # events at which algorithms may do that


def weigh_alike(state: Any, listeners: Callable[[str], list[Any]]) -> bool:
    """Return whether all training samples have the same weight in the loss, so that ranks know each other's weights.

    They do unless the model weights its samples, see `Model.loss_averages`. They also do if the loader declares
    `equal_targets` (each sample has the same number of targets, and none is left out), the model's `loss_weight` is
    marked as `counts_targets`, and no algorithm may change batches. The result is the same on all ranks.
    """
    if state.unwrapped_model.loss_averages != "weights":
        return True
    weight = type(state.unwrapped_model).loss_weight
    active = {id(listener) for event in _CHANGE_BATCHES for listener in listeners(event)}
    is_declared = getattr(state.train_dataloader, "equal_targets", False) and getattr(weight, "counts_targets", False)
    return is_declared and active.isdisjoint(map(id, state.algorithms))


def _in_turn(batches: Iterator[Any], num_samples: Callable[[Any], int], rank: int, ranks: int) -> Iterator[Share]:
    """Yield each batch on one rank only. All ranks read all batches, so they need not communicate."""
    while group := [*islice(batches, ranks)]:
        counts = [num_samples(batch) for batch in group]
        has_batch = rank < len(group)
        yield Share(group[rank if has_batch else 0], counts[rank] if has_batch else 0, sum(counts))


_END = object()
_OVER, _NEVER = -1, -2  # instead of a rank's number of samples: it has no more batches, or never had any


def _in_step(
    batches: Iterator[Any], num_samples: Callable[[Any], int], name: str, loader: Any = None
) -> Iterator[Share]:
    """Yield this rank's batches until no rank has any left; a rank without more batches repeats its last one.

    For each batch, ranks exchange their numbers of samples with one sum on the host.
    """
    last: Any = None
    for batch in chain(batches, repeat(_END)):
        if batch is _END and last is None:
            last = getattr(loader, "last", None)
        counts = _gather(num_samples(batch) if batch is not _END else _NEVER if last is None else _OVER)
        if max(counts) < 0:
            return
        _refuse_empty(counts, _NEVER, name)
        last = last if batch is _END else batch
        yield Share(last, max(0, counts[get_data_parallel_rank()]), sum(count for count in counts if count > 0))


def _gather(number: int) -> list[int]:
    """Return every rank's number, in the order of ranks. All ranks, on the host."""
    numbers = torch.zeros(get_data_parallel_size(), dtype=torch.int64)
    numbers[get_data_parallel_rank()] = number
    return all_reduce_sum(numbers).tolist()
