import time
from itertools import pairwise

import numpy
import pytest
import torch

from runner.data.shards.order import BlockOrder

SIZES = [5, 3, 8, 1, 7, 6, 4]


def epoch(order: BlockOrder, number: int, first: int = 0) -> list[list[int]]:
    return [order.indices(number, batch).tolist() for batch in range(first, len(order))]


@pytest.mark.parametrize("mixed", [1, 2, 3, 20])
@pytest.mark.parametrize("batch_size", [1, 4, 9, 40])
def test_each_sample_comes_once_an_epoch_in_groups_of_blocks(mixed: int, batch_size: int):
    order = BlockOrder(SIZES, mixed, batch_size, seed=3)
    samples = [sample for batch in epoch(order, 1) for sample in batch]
    assert sorted(samples) == [*range(sum(SIZES))]
    assert samples == order.permutation(1).tolist()
    blocks = numpy.searchsorted(numpy.cumsum(SIZES), samples, "right").tolist()
    if batch_size == 1:  # all blocks of a group are read before the next group
        runs = sum(block != following for block, following in pairwise(blocks)) + 1
        assert (runs == len(SIZES)) == (mixed == 1)  # samples are mixed within a group
        batch = 0
        while batch < len(order):
            current, _, due = order.upcoming(1, batch)
            assert len(current) <= mixed and {*blocks[batch:due]} == {*current}
            assert due - batch == sum(SIZES[block] for block in current)
            batch = due


def test_the_order_depends_only_on_seed_and_epoch():
    order = BlockOrder(SIZES, 3, 4, seed=3)
    fresh = BlockOrder(SIZES, 3, 4, seed=3)
    assert epoch(fresh, 7, first=5) == epoch(order, 7)[5:]  # whatever was read before
    assert epoch(order, 0) != epoch(order, 1)
    assert epoch(order, 0) != epoch(BlockOrder(SIZES, 3, 4, seed=4), 0)
    unshuffled = BlockOrder(SIZES, 3, 4, shuffle=False)
    samples = torch.cat([unshuffled.indices(2, batch) for batch in range(len(unshuffled))])
    assert samples.tolist() == [*range(sum(SIZES))]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_each_batch(world_size: int, shuffle: bool):
    whole = BlockOrder(SIZES, 3, 4, shuffle=shuffle)
    ranks = [BlockOrder(SIZES, 3, 4, shuffle=shuffle, rank=rank, world_size=world_size) for rank in range(world_size)]
    for batch in range(len(whole)):
        parts = [order.indices(1, batch)[: order.counts(batch)[0]] for order in ranks]
        assert torch.cat(parts).equal(whole.indices(1, batch))


def test_drop_last_leaves_out_an_incomplete_batch():
    order = BlockOrder(SIZES, 2, 4, drop_last=True)
    assert len(order) == 8 and all(len(batch) == 4 for batch in epoch(order, 0))
    assert len(order.permutation(0)) == sum(SIZES)


@pytest.mark.parametrize("world_size", [1, 2])
def test_upcoming_blocks_are_read_next(world_size: int):
    sizes = [50] * 12
    for rank in range(world_size):
        order = BlockOrder(sizes, 4, 10, rank=rank, world_size=world_size)
        batch, groups = 0, []
        while batch < len(order):
            current, following, due = order.upcoming(0, batch)
            assert due > batch
            samples = torch.cat([order.indices(0, number) for number in range(batch, min(due, len(order)))])
            blocks = {*(samples // 50).tolist()}
            # The samples of a batch are random, so a rank may read a few of its neighbor's blocks.
            assert {*current} <= blocks if world_size > 1 else {*current} == blocks
            assert len(current) == 4 // world_size
            groups.append((current, following))
            batch = due
        assert all(before[1] == after[0] for before, after in pairwise(groups))
        assert groups[-1][1] == order.upcoming(1, 0)[0]


def test_late_batches_are_found_as_quickly_as_early_ones():
    sizes = [10_000] * 20_000

    def measure(batch: int) -> float:
        order = BlockOrder(sizes, 8, 100)
        start = time.process_time()
        order.indices(3, batch)
        return time.process_time() - start

    early, late = (min(measure(batch) for _ in range(5)) for batch in (10, 1_000_000))
    assert late < 5 * early + 0.01


def test_folds_are_refused():
    with pytest.raises(ValueError, match="folds cannot redistribute samples in shards"):
        BlockOrder(SIZES, 2, 4).resize(10)
