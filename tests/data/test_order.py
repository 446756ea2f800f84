import pytest
import torch

from runner.data import SampleOrder


def orders(world_size, num_samples, batch_size, **options):
    return [
        SampleOrder(num_samples, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]


def counted_samples(order, epoch, batch):
    """Return the samples of this rank's share that count."""
    indices = order.indices(epoch, batch)
    count = order.counts(batch)[0]
    assert len(indices) == max(count, 1)
    return indices[:count].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_is_seen_once_in_the_same_batches_on_any_number_of_ranks(world_size, shuffle):
    for num_samples in range(1, 41):
        for batch_size in (1, 2, 3, 5, 7, 8, 16, 39, 40, 64):
            (whole,) = orders(1, num_samples, batch_size, shuffle=shuffle, seed=3)
            ranks = orders(world_size, num_samples, batch_size, shuffle=shuffle, seed=3)
            assert {len(order) for order in ranks} == {len(whole)} == {-(-num_samples // batch_size)}
            seen = []
            for batch in range(len(whole)):
                shares = [counted_samples(order, 1, batch) for order in ranks]
                samples = [sample for share in shares for sample in share]
                assert samples == whole.indices(1, batch).tolist()
                assert len(samples) == (batch_size if batch < len(whole) - 1 else num_samples - batch * batch_size)
                sizes = [len(share) for share in shares]
                assert max(sizes) - min(sizes) <= 1
                assert {order.counts(batch)[1] for order in ranks} == {len(samples)}
                seen += samples
            assert sorted(seen) == list(range(num_samples))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_drop_last_leaves_out_only_the_incomplete_batch(world_size):
    for num_samples in range(5, 41):
        ranks = orders(world_size, num_samples, 5, drop_last=True)
        seen = [
            sample for batch in range(len(ranks[0])) for order in ranks for sample in counted_samples(order, 0, batch)
        ]
        assert len(seen) == len(set(seen)) == num_samples // 5 * 5


def test_a_rank_with_an_empty_share_gets_a_sample_that_does_not_count():
    ranks = orders(4, 9, 8, seed=1)
    last = SampleOrder(9, 8, seed=1, rank=0, world_size=1).indices(0, 1)
    assert len(last) == 1
    for order in ranks:
        torch.testing.assert_close(order.indices(0, 1), last)
    assert sorted(order.counts(1) for order in ranks) == [(0, 1), (0, 1), (0, 1), (1, 1)]


def test_the_order_depends_only_on_seed_and_epoch():
    order = SampleOrder(1000, 10, seed=5)
    first = order.permutation(2).tolist()
    order.permutation(0)
    torch.manual_seed(1)
    assert order.permutation(2).tolist() == first == SampleOrder(1000, 77, seed=5).permutation(2).tolist()
    different = [SampleOrder(1000, 10, seed=seed).permutation(epoch).tolist() for seed in (4, 5, 6) for epoch in (1, 3)]
    assert first not in different
    assert len({tuple(permutation) for permutation in different}) == 6
    assert SampleOrder(6, 4, shuffle=False).permutation(9).tolist() == [0, 1, 2, 3, 4, 5]


def test_indices_are_int64():
    for shuffle in (True, False):
        assert SampleOrder(10, 3, shuffle=shuffle).indices(0, 3).dtype == torch.int64


def test_rank_and_world_size_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (SampleOrder(8, 4).rank, SampleOrder(8, 4).world_size) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (SampleOrder(8, 4).rank, SampleOrder(8, 4).world_size) == (2, 3)
    assert (SampleOrder(8, 4, rank=0, world_size=1).rank, SampleOrder(8, 4, rank=0, world_size=1).world_size) == (0, 1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK='first' in the environment must be an integer"):
        SampleOrder(8, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_samples": 0}, ValueError, "num_samples=0: the data set is empty"),
        ({"num_samples": -1}, ValueError, "num_samples=-1: must be at least 1"),
        ({"batch_size": 0}, ValueError, "batch_size=0: must be at least 1"),
        ({"batch_size": 2.0}, TypeError, "batch_size=2.0: must be an integer, not float"),
        ({"batch_size": True}, TypeError, "batch_size=True: must be an integer, not bool"),
        ({"seed": -3}, ValueError, "seed=-3: must be at least 0"),
        ({"rank": 2}, ValueError, "rank=2: must be less than world_size=2"),
        ({"rank": -1}, ValueError, "rank=-1: must be at least 0"),
        ({"world_size": 0}, ValueError, "world_size=0: must be at least 1"),
        ({"batch_size": 9, "drop_last": True}, ValueError, "batch_size=9 with drop_last=True leaves no batch"),
    ],
)
def test_errors_name_the_wrong_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        SampleOrder(**({"num_samples": 8, "batch_size": 4, "rank": 0, "world_size": 2} | arguments))


def test_batches_and_epochs_out_of_range_are_errors():
    order = SampleOrder(8, 4)
    for batch in (-1, 2):
        with pytest.raises(IndexError, match=f"batch={batch} is out of range: an epoch has batches 0 to 1"):
            order.indices(0, batch)
        with pytest.raises(IndexError, match=f"batch={batch} is out of range"):
            order.counts(batch)
    with pytest.raises(ValueError, match="epoch=-1: must be at least 0"):
        order.indices(-1, 0)


def test_counts_ignore_the_content_of_the_batch():
    order = SampleOrder(9, 8, rank=0, world_size=2)
    assert [order.counts(batch, torch.zeros(99)) for batch in (0, 1)] == [(4, 8), (0, 1)]
