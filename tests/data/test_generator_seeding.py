"""Random generators in data sets are seeded for each sample, or a warning names them."""

from __future__ import annotations

import functools
import logging
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.quasirandom import SobolEngine
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from runner import ClassificationModel, Trainer
from runner.data import DatasetLoader, TensorLoader
from runner.data.generator_seeding import _warn, find_generators

MODULE_GENERATOR = numpy.random.default_rng(5)


class Draw:
    """A transform that appends a draw from a generator to a sample."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, sample: list[float]) -> list[float]:
        return [*sample, draw(self.generator)]


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator, dtype=torch.float64))
    return float(generator.random())


def add_noise(sample: list[float], generator: Any) -> list[float]:
    return [*sample, draw(generator)]


class Suspended:
    """Draws from a generator function, which each process starts when it reads its first sample."""

    def __init__(self) -> None:
        self.numbers: Iterator[float] | None = None

    def __call__(self, sample: list[float]) -> list[float]:
        if self.numbers is None:
            self.numbers = draw_forever(random.Random(3))
        return [*sample, next(self.numbers)]


def draw_forever(generator: random.Random) -> Iterator[float]:
    while True:
        yield generator.random()


def draw_bits(sample: list[float], bits: numpy.random.BitGenerator) -> list[float]:
    return [*sample, numpy.random.Generator(bits).random()]


class Compose:
    """Applies the transforms of a list or dict in order."""

    def __init__(self, transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, sample: list[float]) -> list[float]:
        for transform in self.transforms.values() if isinstance(self.transforms, dict) else self.transforms:
            sample = transform(sample)
        return sample


class Slotted:
    __slots__ = ("generator",)

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, sample: list[float]) -> list[float]:
        return [*sample, draw(self.generator)]


def closure(generator: Any) -> Any:
    return lambda sample: [*sample, draw(generator)]


class Noisy(Dataset[Any]):
    """Each sample is its number and some draws."""

    def __init__(self, transform: Any, size: int = 16) -> None:
        self.transform = transform
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.transform([float(index)]), dtype=torch.float64)


class Lazy(Noisy):
    """Makes its generator when a process reads its first sample."""

    def __init__(self) -> None:
        super().__init__(None)
        self.generator: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.generator is None:
            self.generator = numpy.random.default_rng()
        return torch.tensor([float(index), self.generator.random()], dtype=torch.float64)


class FromModule(Noisy):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), *[MODULE_GENERATOR.random() for _ in range(2)]], dtype=torch.float64)


class FromClass(Noisy):
    generator = random.Random(3)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), self.generator.random()], dtype=torch.float64)


def several() -> Noisy:
    kinds = [numpy.random.default_rng(0), random.Random(0), torch.Generator(), numpy.random.RandomState(0)]
    philox = numpy.random.Generator(numpy.random.Philox(1))
    return Noisy(Compose([*map(Draw, kinds), functools.partial(add_noise, generator=philox)]))


DATASETS = {
    "numpy": lambda: Noisy(Draw(numpy.random.default_rng(0))),
    "python": lambda: Noisy(Draw(random.Random(0))),
    "torch": lambda: Noisy(Draw(torch.Generator())),
    "legacy numpy": lambda: Noisy(Draw(numpy.random.RandomState(0))),
    "bit generator": lambda: Noisy(functools.partial(draw_bits, bits=numpy.random.PCG64(0))),
    "suspended": lambda: Noisy(Suspended()),
    "several in a list": several,
    "dict": lambda: Noisy(Compose({"first": Draw(random.Random(0)), "second": Draw(random.Random(0))})),
    "slots": lambda: Noisy(Slotted(random.Random(0))),
    "closure": lambda: Noisy(closure(numpy.random.default_rng(0))),
    "method": lambda: Noisy(Draw(random.Random(0)).__call__),
    "wrapped": lambda: ConcatDataset([Subset(Noisy(Draw(random.Random(0))), [3, 1, 2]), FromClass(None, 13)]),
    "lazy": Lazy,
    "module": lambda: FromModule(None),
    "class": lambda: FromClass(None),
}


def read(make: Any, epochs: int = 3, start: tuple[int, int] = (0, 0), **options: Any) -> list[list[list[float]]]:
    loader = DatasetLoader(make(), batch_size=4, shuffle=True, **options)
    batches = []
    for epoch in range(start[0], epochs):
        loader.seek(epoch, start[1] if epoch == start[0] else 0)
        batches += [batch.tolist() for batch in loader]
    return batches


@pytest.mark.parametrize("name", DATASETS)
def test_draws_of_a_sample_are_the_same_for_any_number_of_workers_and_after_a_resume(name: str):
    make = DATASETS[name]
    batches = read(make)
    draws = [value for batch in batches for sample in batch for value in sample[1:]]
    assert len({*draws}) == len(draws)  # all differ between samples, epochs and generators
    assert read(make, start=(1, 2)) == batches[6:]
    assert read(make, num_workers=2, multiprocessing_context="fork") == batches


def test_generators_are_restored_after_reading():
    generators: list[Any] = [
        numpy.random.default_rng(0),
        random.Random(0),
        torch.Generator(),
        numpy.random.RandomState(0),
    ]

    def states() -> list[Any]:
        python, *numpys, torchs = (generators[index] for index in (1, 0, 3, 2))
        return [python.getstate(), *map(pickle.dumps, numpys), torchs.get_state().tolist()]

    before = states()
    read(lambda: Noisy(Compose([Draw(generator) for generator in generators])), epochs=1)
    assert states() == before


def test_training_and_evaluation_can_share_a_generator():
    generator = numpy.random.default_rng(0)
    expected = read(lambda: Noisy(Draw(generator)), epochs=1)
    train, evaluation = (DatasetLoader(Noisy(Draw(generator)), batch_size=4, shuffle=True) for _ in range(2))
    mixed = []
    for batch in train:
        mixed.append(batch.tolist())
        next(iter(evaluation))
    assert mixed == expected


def test_reading_without_draws_leaves_samples_unchanged():
    class Prepared(Noisy):
        def __init__(self) -> None:
            super().__init__(None)
            self.generator = numpy.random.default_rng(0)
            self.values = torch.from_numpy(self.generator.random(16))

        def __getitem__(self, index: int) -> Any:
            return self.values[index]

    (batch,) = DatasetLoader(Prepared(), batch_size=16, shuffle=False)
    assert batch.tolist() == numpy.random.default_rng(0).random(16).tolist()


def test_the_search_for_generators_is_bounded_and_handles_cycles():
    cycle: list[Any] = [random.Random(0)]
    cycle.append(cycle)
    assert [path for path, _ in find_generators({"dataset": cycle})] == ["dataset[0]"]
    assert not [*find_generators({"dataset": [random.Random(0)] * 2000})]  # a long list holds data
    assert not [*find_generators({"dataset": [random, numpy.random, torch.default_generator, random.random]})]


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.generator = numpy.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.from_numpy(self.generator.random(4)), 0) for _ in range(4))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), "loader.dataset.generator"),
        (
            lambda: TensorLoader(torch.zeros(4, 4), batch_size=2, shuffle=False, transform=Draw(random.Random())),
            "transform.generator",
        ),
        (lambda: DatasetLoader(Noisy(Draw(random.SystemRandom())), 4, shuffle=False), "dataset.transform.generator"),
        (
            lambda: DatasetLoader(Noisy(Draw(numpy.random.SeedSequence(1))), 4, shuffle=False),
            "dataset.transform.generator",
        ),
        (lambda: DatasetLoader(Noisy(Draw(SobolEngine(1, True))), 4, shuffle=False), "dataset.transform.generator"),
        (lambda: DatasetLoader(several(), 4, shuffle=False), None),
        (lambda: DataLoader(Noisy(None), batch_size=2, shuffle=True, generator=torch.Generator()), None),
    ],
)
def test_one_warning_names_an_unseeded_generator(caplog, make: Any, path: str | None):
    _warn.cache_clear()
    with caplog.at_level(logging.WARNING, "runner"):
        for _ in range(2):
            model = ClassificationModel(torch.nn.Linear(4, 2), 2)
            Trainer(model=model, train_dataloader=make(), device="cpu").close()
    messages = [record.getMessage() for record in caplog.records]
    expected = [f"train_dataloader: nothing seeds the random generator {path}."] * (path is not None)
    assert [message[: len(expected[0])] if expected else message for message in messages] == expected
