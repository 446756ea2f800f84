"""Folds of training and evaluation data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.fake import FakeLoader
from runner.data.folds import Folds
from runner.data.loaders import DatasetLoader, TensorLoader


class Images(Dataset[Any]):
    """Each sample is its number and class; as in torchvision's data sets, `transform` is applied to it."""

    def __init__(self, first: int, last: int, transform: Any) -> None:
        self.numbers = range(first, last)
        self.targets = [number % 3 for number in self.numbers]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.transform(self.numbers[index]), self.targets[index]


def in_memory(rank: int = 0, world_size: int = 1) -> tuple[Any, Any]:
    numbers = torch.arange(23)
    loaders = [
        TensorLoader(part, part % 3, batch_size=4, shuffle=shuffle, rank=rank, world_size=world_size)
        for shuffle, part in ((True, numbers[:16]), (False, numbers[16:]))
    ]
    return loaders[0], loaders[1]


def read_by_index(augment: Any = int, num_workers: int = 0) -> tuple[Any, Any]:
    train = DatasetLoader(Images(0, 16, augment), 4, shuffle=True, num_workers=num_workers)
    return train, DatasetLoader(Images(16, 23, int), 4, shuffle=False, num_workers=num_workers)


def pair(*shapes: tuple[int, ...]) -> list[TensorLoader]:
    return [TensorLoader(torch.zeros(shape), batch_size=1, shuffle=False) for shape in shapes]


def samples(loader: Any) -> list[int]:
    return [int(number) for batch in loader for number in batch[0]]


@pytest.mark.parametrize("make", [in_memory, read_by_index])
@pytest.mark.parametrize("stratified", [False, True])
def test_each_sample_is_held_out_in_one_fold_and_trained_on_in_the_others(make: Any, stratified: bool):
    held_out = []
    for fold in range(5):
        train, evaluation = make()
        Folds(fold, 5, stratified).apply(train, evaluation)
        evaluated = samples(evaluation)
        assert len(evaluated) in (4, 5)
        assert sorted(samples(train) + evaluated) == [*range(23)]
        if stratified:
            counts = torch.bincount(torch.tensor(evaluated) % 3, minlength=3)
            assert counts.min() >= 1 and counts.max() <= 2  # 8, 8 and 7 samples in 5 folds
        held_out += evaluated
    assert sorted(held_out) == [*range(23)]


def test_two_ranks_share_the_samples_of_a_fold():
    shares: list[list[int]] = []
    for rank in range(2):
        train, evaluation = in_memory(rank, world_size=2)
        Folds(1, 4).apply(train, evaluation)
        assert len(train) == 5 and len(evaluation) == 2
        shares.append(samples(train))
    train, evaluation = in_memory()
    Folds(1, 4).apply(train, evaluation)
    assert {*shares[0], *shares[1]} == {*samples(train)}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_samples_are_augmented_only_for_training(num_workers: int):
    train, evaluation = read_by_index(lambda number: 100 + number, num_workers)
    Folds(0).apply(train, evaluation)
    assert min(samples(train)) >= 100 > max(samples(evaluation))


def test_folds_depend_only_on_their_seed():
    assert Folds(0, seed=1).assign(100).equal(Folds(3, seed=1).assign(100))
    assert not Folds(0, seed=1).assign(100).equal(Folds(0, seed=2).assign(100))


def test_fake_loaders_have_the_sizes_of_a_fold():
    def make(count: int) -> Tensor:
        return torch.zeros(count)

    train, evaluation = FakeLoader(make, 16, 4), FakeLoader(make, 7, 4)
    Folds(0, 4, stratified=True).apply(train, evaluation)
    assert (train.order.num_samples, evaluation.order.num_samples) == (17, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"held_out": 5}, "held_out=5: must be a whole number from 0 to 4"),
        ({"held_out": -1}, "held_out=-1: must be a whole number from"),
        ({"held_out": 0, "count": 1}, "count=1: must be a whole number, at least 2"),
        ({"held_out": 0, "seed": -1}, "seed=-1"),
    ],
)
def test_errors_name_the_wrong_argument(arguments: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Folds(**arguments)


def test_data_that_cannot_be_divided_is_refused():
    train, evaluation = in_memory()
    with pytest.raises(TypeError, match="not TensorLoader and list"):
        Folds(0).apply(train, [1])
    with pytest.raises(TypeError, match="not TensorLoader and DatasetLoader"):
        Folds(0).apply(train, read_by_index()[1])
    with pytest.raises(ValueError, match="count=24: there are only 23 samples"):
        Folds(0, 24).apply(train, evaluation)
    with pytest.raises(ValueError, match="one shape"):
        Folds(0).apply(*pair((4, 2), (4, 3)))
    with pytest.raises(TypeError, match="stratified=True: the data needs classes as whole numbers"):
        Folds(0, 2, stratified=True).apply(*pair((4, 2), (4, 2)))
