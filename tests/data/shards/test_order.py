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
    seen = [one for batch in epoch(order, 1) for one in batch]
    assert sorted(seen) == [*range(sum(SIZES))]
    assert seen == order.permutation(1).tolist()
    block = numpy.searchsorted(numpy.cumsum(SIZES), seen, "right").tolist()
    if batch_size == 1:  # the blocks of a group are done before another group begins
        runs = sum(one != other for one, other in pairwise(block)) + 1
        assert (runs == len(SIZES)) == (mixed == 1)  # within it, they are mixed
        batch = 0
        while batch < len(order):
            now, _, due = order.upcoming(1, batch)
            assert len(now) <= mixed and {*block[batch:due]} == {*now}
            assert due - batch == sum(SIZES[one] for one in now)
            batch = due


def test_the_order_depends_on_seed_and_epoch_alone():
    order = BlockOrder(SIZES, 3, 4, seed=3)
    other = BlockOrder(SIZES, 3, 4, seed=3)
    assert epoch(other, 7, first=5) == epoch(order, 7)[5:]  # whatever was asked before
    assert epoch(order, 0) != epoch(order, 1)
    assert epoch(order, 0) != epoch(BlockOrder(SIZES, 3, 4, seed=4), 0)
    flat = BlockOrder(SIZES, 3, 4, shuffle=False)
    assert torch.cat([flat.indices(2, one) for one in range(len(flat))]).tolist() == [*range(sum(SIZES))]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_each_batch(world_size: int, shuffle: bool):
    whole = BlockOrder(SIZES, 3, 4, shuffle=shuffle)
    ranks = [BlockOrder(SIZES, 3, 4, shuffle=shuffle, rank=one, world_size=world_size) for one in range(world_size)]
    for batch in range(len(whole)):
        parts = [one.indices(1, batch)[: one.counts(batch)[0]] for one in ranks]
        assert torch.cat(parts).equal(whole.indices(1, batch))


def test_drop_last_leaves_out_an_incomplete_batch():
    order = BlockOrder(SIZES, 2, 4, drop_last=True)
    assert len(order) == 8 and all(len(one) == 4 for one in epoch(order, 0))
    assert len(order.permutation(0)) == sum(SIZES)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_comes_next_is_what_is_read_next(world_size: int):
    sizes = [50] * 12
    for rank in range(world_size):
        order = BlockOrder(sizes, 4, 10, rank=rank, world_size=world_size)
        batch, found = 0, []
        while batch < len(order):
            now, following, due = order.upcoming(0, batch)
            assert due > batch
            read = {one // 50 for step in range(batch, min(due, len(order))) for one in order.indices(0, step).tolist()}
            # Ranks draw, so that one may read a little of its neighbor's.
            assert {*now} <= read if world_size > 1 else {*now} == read
            assert len(now) == 4 // world_size
            found.append((now, following))
            batch = due
        assert all(before[1] == after[0] for before, after in pairwise(found))
        assert found[-1][1] == order.upcoming(1, 0)[0]


def test_a_million_batches_on_cost_nothing():
    sizes = [10_000] * 20_000

    def first(batch: int) -> float:
        order = BlockOrder(sizes, 8, 100)
        began = time.process_time()
        order.indices(3, batch)
        return time.process_time() - began

    near, far = (min(first(batch) for _ in range(5)) for batch in (10, 1_000_000))
    assert far < 5 * near + 0.01


def test_folds_are_refused():
    with pytest.raises(ValueError, match="folds cannot redistribute samples in shards"):
        BlockOrder(SIZES, 2, 4).resize(10)
