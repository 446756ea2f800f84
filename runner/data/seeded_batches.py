"""Read batches of a data set, in any process, with random numbers that depend on the sample alone."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from runner.core.randomness import stream_seed
from runner.data.collation import GrowingBatch
from runner.data.generator_seeding import OwnGenerators

Transform = Callable[[Any], Any]
"""`transform(batch)` returns the batch to yield."""


class SeededBatches(Dataset[Any]):
    """Reads whole batches of a data set, each sample with generators seeded for it, and transforms them on request."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int, transform: Transform | None = None
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.seed = seed
        self.transform = transform
        self.reading: Any = None
        """In a worker: an array whose only element is the number of the sample being read, or -1."""
        self._generators: OwnGenerators | None = None
        self._owner: tuple[int, Any] = (0, None)  # the process and data set that `_generators` belongs to

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_generators": None, "_owner": (0, None)}

    def __getitem__(self, key: tuple[int, int, Sequence[int], bool]) -> Any:
        epoch, batch, indices, transforms = key
        has_read_batch = hasattr(self.dataset, "read_batch")  # it draws no random numbers
        generators = None if has_read_batch else self._find_generators()
        # Only saved outside workers: in a worker, no other code draws random numbers.
        states = None if generators is None or get_worker_info() is not None else (*_get_states(), generators.states())
        try:
            content = self.dataset.read_batch(indices) if generators is None else self._read(epoch, indices, generators)
            return self.transform(content) if transforms and self.transform is not None else content
        except BaseException as error:
            error.add_note(f"while batch {batch + 1} of epoch {epoch + 1} was read (both from 1)")
            if "shared memory" in str(error):  # torch has no exception type for it
                error.add_note(
                    "shared memory is full: enlarge /dev/shm, or lower num_workers, prefetch_factor or batch_size"
                )
            if isinstance(error, Exception) or get_worker_info() is None:
                raise
            raise RuntimeError(f"the data set raised {type(error).__name__}, which would end the worker") from error
        finally:
            if self.reading is not None:
                self.reading[0] = -1
            if states is not None:
                random.setstate(states[0])
                numpy.random.set_state(states[1])
                torch.default_generator.set_state(states[2])
                for restore in states[3]:
                    restore()

    def _find_generators(self) -> OwnGenerators:
        """Return the generators that the data set holds; search for them once per process."""
        process, dataset = self._owner
        if self._generators is None or process != os.getpid() or dataset is not self.dataset:
            self._generators = OwnGenerators(dataset=self.dataset, collate_fn=self.collate_fn)
            self._owner = os.getpid(), self.dataset
        return self._generators

    def _read(self, epoch: int, indices: Sequence[int], generators: OwnGenerators) -> Any:
        growing = GrowingBatch(len(indices)) if self.collate_fn is default_collate else None
        samples = []
        numbers = numpy.array(indices, numpy.uint64)
        seeds = stream_seed(self.seed, "sample", epoch, numbers).tolist()
        generators.prepare(self.seed, epoch, numbers)
        for position, (index, seed) in enumerate(zip(indices, seeds, strict=True)):
            sample = self._read_sample(index, seed, generators, position)
            if generators.search_again():  # new ones have unknown seeds: read the sample again
                generators.prepare(self.seed, epoch, numbers)
                sample = self._read_sample(index, seed, generators, position)
            samples.append(sample if growing is None else growing.keep(sample))
            del sample  # so the next sample can use its memory
        return self.collate_fn(samples) if growing is None else growing.collate(samples)

    def _read_sample(self, index: int, seed: int, generators: OwnGenerators, position: int) -> Any:
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)
        # torch.manual_seed would also reseed every accelerator.
        torch.default_generator.manual_seed(seed)
        generators.start(position)
        if self.reading is not None:
            self.reading[0] = index
        try:
            return self.dataset[index]
        except BaseException as error:
            error.add_note(f"raised by dataset[{index}]")
            raise


def _get_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
