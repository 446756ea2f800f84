"""Batches of any loader: their order and random numbers by seed and epoch, their number, dtype and device."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from runner.data import DatasetLoader, TensorLoader
from runner.device.batch import count_samples
from runner.training.dataloader import BatchStream
from runner.training.precision import Precision


def make_stream(loader: Any, precision: str = "fp32", seed: int = 0, label: str = "train") -> BatchStream:
    return BatchStream(loader, torch.device("cpu"), Precision(precision), count_samples, label, seed)


def numbers(stream: BatchStream, epoch: int = 0, batch: int = 0) -> list[list[int]]:
    """Return the numbers in the batches of an epoch, from a batch on."""
    batches = stream.start(epoch, batch)
    return [(batch[0] if isinstance(batch, tuple | list) else batch).tolist() for batch in batches]


def dataset(size: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(size), torch.zeros(size))


class Epochs:
    """A sampler that records the epochs passed to `set_epoch`, and begins each epoch with that number."""

    def __init__(self, size: int = 10):
        self.size, self.epoch, self.epochs = size, 0, []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.epochs.append(epoch)

    def __iter__(self):
        return iter([(number + self.epoch) % self.size for number in range(self.size)])

    def __len__(self):
        return self.size


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10))


LOADERS = {
    "tensors": lambda: TensorLoader(torch.arange(10), torch.zeros(10), batch_size=3, shuffle=True),
    "dataset": lambda: DatasetLoader(dataset(), batch_size=3, shuffle=True),
    "shuffled": lambda: DataLoader(dataset(), batch_size=3, shuffle=True),
    "own generator": lambda: DataLoader(
        dataset(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "sampler's generator": lambda: DataLoader(
        dataset(), batch_size=3, sampler=RandomSampler(dataset(), generator=torch.Generator().manual_seed(4))
    ),
    "batch sampler": lambda: DataLoader(dataset(), batch_sampler=BatchSampler(RandomSampler(dataset()), 3, False)),
    "distributed": lambda: DataLoader(
        dataset(), batch_size=3, sampler=DistributedSampler(dataset(), num_replicas=1, rank=0)
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_can_start_at_any_batch(name: str):
    make = LOADERS[name]
    stream = make_stream(make())
    epochs = [numbers(stream, epoch) for epoch in range(3)]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in (2, 0, 1):
        for batch in range(5):
            torch.rand(batch + 1)  # other random numbers do not matter
            assert numbers(make_stream(make()), epoch, batch) == epochs[epoch][batch:]
            assert numbers(stream, epoch, batch) == epochs[epoch][batch:]


@pytest.mark.parametrize("name", ["shuffled", "own generator", "sampler's generator", "batch sampler"])
def test_the_order_of_torch_dataloaders_depends_on_the_seed_of_the_run(name: str):
    orders = {str(numbers(make_stream(LOADERS[name](), seed=seed))) for seed in range(4)}
    assert len(orders) == 4


@pytest.mark.parametrize("owner", ["sampler", "batch_sampler", "loader", "within batch_sampler"])
def test_set_epoch_is_called_on_loaders_and_samplers(owner: str):
    sampler: Any = Epochs()
    if owner == "sampler":
        loader: Any = DataLoader(dataset(), batch_size=5, sampler=sampler)
    elif owner == "within batch_sampler":
        loader = DataLoader(dataset(), batch_sampler=BatchSampler(sampler, 5, False))
    elif owner == "batch_sampler":

        class Batches(Epochs):
            def __iter__(self) -> Any:
                order = list(super().__iter__())
                return iter([order[:5], order[5:]])

        sampler = Batches()
        loader = DataLoader(dataset(), batch_sampler=sampler)
    else:

        class Loader(Epochs):
            def __iter__(self) -> Any:
                return iter(torch.tensor(list(super().__iter__())).split(5))

        loader = sampler = Loader()
    stream = make_stream(loader)
    assert numbers(stream, 0)[0] == [0, 1, 2, 3, 4] and numbers(stream, 3, 1) == [[8, 9, 0, 1, 2]]
    assert sampler.epochs == [0, 3]


def test_random_numbers_of_a_dataset_depend_on_epoch_and_batch_alone():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.rand(())

    def noise(epoch: int, batch: int = 0) -> list[list[float]]:
        read = []
        for values in make_stream(DataLoader(Noisy(), batch_size=2)).start(epoch, batch):
            read.append(values.tolist())
            torch.rand(len(read) + batch)  # other random numbers do not matter
        return read

    assert noise(1)[2:] == noise(1, 2) and noise(0) != noise(1)
    assert len({value for epoch in range(3) for batch in noise(epoch) for value in batch}) == 24


@pytest.mark.parametrize(
    "make",
    [lambda: [torch.arange(5), torch.arange(5, 10)], lambda: DataLoader(Stream(), batch_size=5)],
    ids=["list", "stream"],
)
def test_any_iterable_of_batches_is_a_loader(make: Any):
    assert numbers(make_stream(make())) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert numbers(make_stream(make()), 0, 1) == [[5, 6, 7, 8, 9]]


def test_a_stream_knows_its_length_and_counts_the_samples_of_each_batch():
    stream = make_stream(TensorLoader(torch.arange(10), batch_size=4, shuffle=False))
    assert stream.length == 3
    assert [stream.counts(index, batch) for index, batch in enumerate(stream.start())] == [(4, 4), (4, 4), (2, 2)]
    plain = make_stream([torch.zeros(4), torch.zeros(2)])
    assert plain.length == 2
    assert [plain.counts(index, batch) for index, batch in enumerate(plain.start())] == [(4, 4), (2, 2)]
    assert make_stream(batch for batch in [torch.zeros(1)]).length is None


@pytest.mark.parametrize("name", ["tensors", "shuffled"])
def test_bf16_casts_floating_tensors_and_amp_does_not(name: str):
    types = {tuple(tensor.dtype for tensor in batch) for batch in make_stream(LOADERS[name](), "bf16").start()}
    assert types == {(torch.int64, torch.bfloat16)}
    types = {tuple(tensor.dtype for tensor in batch) for batch in make_stream(LOADERS[name](), "amp_bf16").start()}
    assert types == {(torch.int64, torch.float32)}


def test_an_unusable_loader_is_an_error_that_names_its_argument():
    with pytest.raises(TypeError, match="train_dataloader=3: must be iterable, yielding batches"):
        make_stream(3)
    with pytest.raises(TypeError, match="put a data set into a DataLoader or a runner.data.DatasetLoader"):
        make_stream(dataset(3))
    with pytest.raises(ValueError, match="dataloader of evaluator 'test' has no batches: its data set"):
        make_stream(DataLoader(dataset(3), batch_size=4, drop_last=True), label="test")


def test_a_single_process_may_use_any_sampler():
    for loader in (DataLoader(dataset()), DataLoader(dataset(), sampler=SequentialSampler(dataset()))):
        assert make_stream(loader).length == 10


@pytest.mark.parametrize("kind", ["dataset", "tensors", "moved"])
def test_batches_are_moved_to_the_device_before_they_are_transformed(kind: str):
    inputs: list[tuple[str, torch.dtype]] = []

    def normalize(batch: torch.Tensor) -> torch.Tensor:
        inputs.append((batch.device.type, batch.dtype))
        return batch.float() / 255

    pixels = torch.arange(10, dtype=torch.uint8)
    if kind == "dataset":
        loader: Any = DatasetLoader(pixels, batch_size=4, shuffle=False, transform=normalize)
    else:
        loader = TensorLoader(pixels, batch_size=4, shuffle=False, transform=normalize, resident=kind == "moved")
    stream = BatchStream(loader, torch.device("meta"), Precision("fp32"), count_samples, "train")
    batches = [*stream.start(0, 1)]
    assert inputs == [("meta", torch.uint8)] * 2
    assert [(batch.device.type, batch.dtype, len(batch)) for batch in batches] == [
        ("meta", torch.float32, 4),
        ("meta", torch.float32, 2),
    ]
    if kind != "moved":
        assert [batch.dtype for batch in make_stream(loader).start()] == [torch.float32] * 3
