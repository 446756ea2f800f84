import pickle
import random

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from runner.data import DatasetLoader, SampleOrder, TensorLoader, loaders
from runner.data.loaders import _warn_of_too_many


class Augmented(Dataset):
    """Returns (number, three random draws), and lists the samples that this process has read."""

    def __init__(self, size=23):
        self.size = size
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        noise = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        return index, torch.tensor(noise, dtype=torch.float64)


def numbers(batches):
    return [batch.tolist() for batch in batches]


@pytest.fixture(params=["tensors", "dataset"])
def make_loader(request):
    """Return a function that makes a loader of the numbers 0 to n - 1."""

    def make(n, **options):
        if request.param == "tensors":
            return TensorLoader(torch.arange(n), **options)
        return DatasetLoader(range(n), **options)

    return make


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_follow_the_order_on_each_rank(make_loader, shuffle, world_size):
    for rank in range(world_size):
        options = {"shuffle": shuffle, "seed": 4, "rank": rank, "world_size": world_size}
        loader = make_loader(10, batch_size=4, **options)
        order = SampleOrder(10, 4, **options)
        assert len(loader) == len(order) == 3
        for epoch in range(2):
            assert numbers(loader) == [order.indices(epoch, batch).tolist() for batch in range(3)]


def test_a_loader_can_be_pickled(make_loader):
    loader = make_loader(10, batch_size=4, shuffle=True)
    numbers(loader)
    assert numbers(pickle.loads(pickle.dumps(loader))) == numbers(loader)


def test_an_abandoned_epoch_is_followed_by_the_next_epoch(make_loader):
    reader = make_loader(11, batch_size=3, shuffle=True)
    next(iter(reader))
    second = make_loader(11, batch_size=3, shuffle=True)
    second.seek(1)
    assert numbers(reader) == numbers(second)


@pytest.mark.parametrize(("epoch", "batch"), [(-1, 0), (0, -1), (0, 5)])
def test_positions_out_of_range_are_errors(make_loader, epoch, batch):
    with pytest.raises(
        ValueError, match=f"epoch={epoch}" if epoch < 0 else f"batch={batch}: must be a number of batches from 0 to 4"
    ):
        make_loader(11, batch_size=3, shuffle=True).seek(epoch, batch)


def test_an_empty_data_set_is_an_error(make_loader):
    with pytest.raises(ValueError, match="the data set is empty"):
        make_loader(0, batch_size=3, shuffle=True)


def test_drop_last_leaves_out_the_incomplete_batch(make_loader):
    assert numbers(make_loader(7, batch_size=3, shuffle=False, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]


def test_iterating_draws_no_global_random_number(make_loader):
    before = torch.get_rng_state()
    list(make_loader(7, batch_size=3, shuffle=True))
    torch.testing.assert_close(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [True, False])
def test_inputs_and_targets_belong_to_the_same_samples(shuffle):
    x, y = torch.arange(20).view(10, 2), torch.arange(10)
    loader = TensorLoader(x, y, batch_size=4, shuffle=shuffle)
    for inputs, targets in loader:
        torch.testing.assert_close(inputs[:, 0], 2 * targets)
    (batch, *_) = loader
    assert isinstance(batch, tuple)


def test_a_transform_sees_each_batch():
    loader = TensorLoader(torch.arange(5), batch_size=2, shuffle=False, transform=lambda batch: (batch, -batch))
    assert [(a.tolist(), b.tolist()) for a, b in loader][-1] == ([4], [-4])
    pairs = TensorLoader(torch.arange(2), torch.ones(2), batch_size=2, shuffle=False, transform=lambda pair: sum(pair))
    assert numbers(pairs) == [[1, 2]]


def test_small_batches_can_be_changed_in_place_and_have_separate_gradients():
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    learned = torch.nn.Parameter(data.clone())
    for batch in TensorLoader(learned, batch_size=8, shuffle=True):
        batch.square().sum().backward()  # frees only the graph of this batch
    torch.testing.assert_close(learned.grad, 2 * data)
    weight, losses = torch.ones(16, requires_grad=True), []
    for batch in TensorLoader(data.clone(), batch_size=8, shuffle=True):
        losses.append((batch.mul_(2) * weight).sum())
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * data.sum(0))


def test_sparse_data_is_shuffled_too():
    data = torch.arange(64.0).reshape(16, 4)
    batches = list(TensorLoader(data.to_sparse(), batch_size=4, shuffle=True))
    assert torch.equal(
        torch.cat([batch.to_dense() for batch in batches]),
        torch.cat(list(TensorLoader(data, batch_size=4, shuffle=True))),
    )


def test_a_transform_cannot_end_an_epoch_early():
    def transform(batch):
        return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(TensorLoader(torch.arange(8), batch_size=2, shuffle=True, transform=transform))


@pytest.mark.parametrize(("device", "alignment"), [("cpu", 64), ("meta", 512)])
@pytest.mark.parametrize("width", [8, 16, 32, 64, 128])
def test_batches_are_aligned_like_separate_memory(device, alignment, width):
    data = torch.zeros(64, width, device=device), torch.zeros(64, dtype=torch.int64, device=device)
    batches = list(TensorLoader(*data, batch_size=8, shuffle=True))
    assert {batch[0].storage_offset() * 4 % alignment for batch in batches} == {0}
    share_memory = width * 8 * 4 % alignment == 0
    assert any(batch[1].storage_offset() for batch in batches) == share_memory


def test_unshuffled_batches_are_views_and_shuffled_batches_are_copies():
    data = torch.arange(6)
    assert next(iter(TensorLoader(data, batch_size=3, shuffle=False))).data_ptr() == data.data_ptr()
    next(iter(TensorLoader(data, batch_size=3, shuffle=True))).zero_()
    assert data.tolist() == list(range(6))


def test_to_moves_the_data_and_returns_the_loader():
    loader = TensorLoader(torch.arange(6), torch.zeros(6), batch_size=3, shuffle=False)
    assert loader.to("meta") is loader
    assert all(tensor.device.type == "meta" for batch in loader for tensor in batch)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "at least one tensor"),
        ((torch.tensor(1.0),), "at least one tensor, with the samples along dimension 0"),
        ((torch.zeros(3), torch.zeros(4)), r"\[3, 4\] samples: they must all have the same number"),
    ],
)
def test_tensors_that_are_not_a_data_set_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        TensorLoader(*tensors, batch_size=1, shuffle=False)


# Forked workers need not import this file; Python 3.12 and later warn that torch's threads are not forked.
with_workers = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def contents(loader):
    return [(index.tolist(), noise.tolist()) for index, noise in loader]


@with_workers
@pytest.mark.parametrize("persistent", [False, True])
def test_augmented_samples_are_the_same_for_any_number_of_workers_and_after_a_seek(persistent):
    in_process = DatasetLoader(Augmented(), 4, shuffle=True, seed=1)
    epochs = [contents(in_process) for _ in range(2)]
    options = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": persistent}
    workers = DatasetLoader(Augmented(), 4, shuffle=True, seed=1, **options)
    assert [contents(workers) for _ in range(2)] == epochs
    workers.seek(1, 3)
    assert contents(workers) == epochs[1][3:]


def test_augmentation_differs_between_samples_epochs_and_seeds_but_not_between_ranks():
    def draws(epoch, seed=0, rank=0, world_size=1):
        loader = DatasetLoader(Augmented(), 8, shuffle=True, seed=seed, rank=rank, world_size=world_size)
        loader.seek(epoch)
        pairs = (pair for batch in loader for pair in zip(*batch, strict=True))
        return {int(index): tuple(noise.tolist()) for index, noise in pairs}

    first = draws(0)
    assert len({value for noise in first.values() for value in noise}) == 3 * 23
    shares = [draws(0, rank=rank, world_size=2) for rank in range(2)]
    assert shares[0] | shares[1] == first
    for different in (draws(1), draws(0, seed=1)):
        assert different.keys() == first.keys()
        assert not {*different.values()} & {*first.values()}


@with_workers
def test_workers_read_no_sample_before_the_position_of_seek():
    class Counted(Augmented):
        def __init__(self):
            super().__init__(1000)
            self.times_read = torch.zeros(1000, dtype=torch.int64).share_memory_()

        def __getitem__(self, index):
            self.times_read[index] += 1
            return super().__getitem__(index)

    dataset = Counted()
    loader = DatasetLoader(dataset, 4, shuffle=True, num_workers=2, multiprocessing_context="fork")
    loader.seek(2, 240)
    list(loader)
    read = dataset.times_read.nonzero().flatten().tolist()
    assert read == sorted(loader.order.permutation(2)[960:].tolist())
    assert int(dataset.times_read.sum()) == 40


def test_tensors_yield_no_batch_before_the_position_of_seek():
    picked = []
    loader = TensorLoader(torch.arange(1000), batch_size=4, shuffle=True, transform=lambda b: picked.extend(b.tolist()))
    loader.seek(2, 240)
    list(loader)
    assert picked == loader.order.permutation(2)[960:].tolist()


@with_workers
def test_global_batches_are_the_same_for_any_number_of_ranks_and_workers():
    def global_batches(world_size, num_workers):
        options = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
        shares = []
        for rank in range(world_size):
            loader = DatasetLoader(Augmented(32), 8, shuffle=True, seed=5, rank=rank, world_size=world_size, **options)
            loader.seek(1, 1)
            shares.append(contents(loader))
        return [
            tuple([value for part in parts for value in part] for parts in zip(*ranks, strict=True))
            for ranks in zip(*shares, strict=True)
        ]

    expected = global_batches(1, 0)
    assert [len(numbers) for numbers, _ in expected] == [8, 8, 8]
    for world_size, num_workers in [(1, 1), (1, 3), (2, 0), (2, 1), (4, 0), (4, 3)]:
        assert global_batches(world_size, num_workers) == expected


def test_reading_restores_the_global_generators():
    def states():
        return random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()

    numpy.random.seed(0)
    before = states()
    list(DatasetLoader(Augmented(), batch_size=4, shuffle=True))
    assert states() == before


@with_workers
def test_a_collate_function_that_draws_is_reproducible():
    def noisy(samples):
        return torch.rand(3).tolist(), [index for index, _ in samples]

    in_process = [DatasetLoader(Augmented(), 4, shuffle=True, collate_fn=noisy) for _ in range(2)]
    workers = DatasetLoader(
        Augmented(), 4, shuffle=True, collate_fn=noisy, num_workers=2, multiprocessing_context="fork"
    )
    batches = [list(loader) for loader in (*in_process, workers)]
    assert batches[0] == batches[1] == batches[2]
    assert len({tuple(noise) for noise, _ in batches[0]}) == 6


@with_workers
def test_more_workers_than_cores_log_one_warning(monkeypatch, caplog):
    """The runner warns once; torch does not warn when a loader is made or an epoch begins."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0}, raising=False)
    _warn_of_too_many.cache_clear()
    options = {"batch_size": 12, "shuffle": False, "world_size": 2, "multiprocessing_context": "fork"}
    for rank in (1, 0):
        for workers in (1, 2, 2):
            loader = DatasetLoader(Augmented(), num_workers=workers, rank=rank, **options)
            assert len([*loader]) == 2
        assert len(caplog.messages) == (rank == 0)
    assert caplog.messages == ["num_workers=2, on 1 cores: more processes than cores seldom read faster"]


def test_a_data_set_that_is_not_map_style_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    for dataset in (Stream(), iter([1, 2])):
        with pytest.raises(TypeError, match="must have a length and be indexed by sample"):
            DatasetLoader(dataset, batch_size=1, shuffle=False)


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(ValueError, match="^num_workers=-1: must be a number of processes, at least 0"):
        DatasetLoader(range(3), batch_size=1, shuffle=False, num_workers=-1)


def test_options_that_would_change_the_order_are_refused():
    with pytest.raises(TypeError, match="generator, sampler: only shuffle and seed determine the order of samples"):
        DatasetLoader(range(3), batch_size=1, shuffle=False, sampler=[2, 1], generator=None)


def halve(batch):
    return batch / 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_can_be_read_without_the_transform(num_workers):
    loader = DatasetLoader(range(7), 4, shuffle=True, num_workers=num_workers, transform=halve)
    raw = [*loader.untransformed()]
    loader.seek(0)
    assert raw[0].dtype == torch.int64 and numbers(loader) == [(batch / 2).tolist() for batch in raw]
    assert numbers(loader.first(1)) == [(raw[0] / 2).tolist()]


def test_persistent_workers_can_read_with_and_without_the_transform():
    loader = DatasetLoader(range(4), 4, shuffle=False, num_workers=1, persistent_workers=True, transform=halve)
    assert [numbers(loader), numbers(loader.untransformed()), numbers(loader)] == [
        [[0.0, 0.5, 1.0, 1.5]],
        [[0, 1, 2, 3]],
        [[0.0, 0.5, 1.0, 1.5]],
    ]


@pytest.mark.parametrize(("free", "stays"), [(4 * 8 * 100, False), (4 * 8 * 100 - 1, True)])
def test_data_above_a_quarter_of_the_free_memory_stays_on_the_host_with_a_message(free, stays, monkeypatch, caplog):
    monkeypatch.setattr(loaders, "free_bytes", lambda device: free)
    loader = TensorLoader(torch.arange(100), batch_size=10, shuffle=True)
    with caplog.at_level("INFO", logger="runner"):
        loader.to("meta")
    assert loader.resident is not stays and loader.tensors[0].is_meta is not stays
    message = "stays in host memory, and is copied batch by batch: more than 25% of the 0.0 GB that are free on meta"
    assert (message in caplog.text) is stays
