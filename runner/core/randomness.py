"""Random streams: one for each consumer, determined by the seed, the consumer's name and its position."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from runner.libraries.typed import restored_torch_generators

_MASK = (1 << 64) - 1


def stream_seed(seed: int, name: str, *counters: Any) -> Any:
    """Return a seed in [0, 2^63) for one draw of one consumer, the same on every platform.

    Streams with different arguments are independent for all practical purposes. Resuming one needs no saved state: its
    arguments determine it.

    Args:
        seed: the seed of the run or of a rank.
        name: the consumer's name: 'order', 'model', an algorithm's config key.
        counters: the consumer's position: epoch, batch, microbatch, ...; if the last is an array of numpy's uint64,
            an array of seeds is returned.
    """
    value = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    for counter in counters:
        value = _mix(value ^ _mix(counter & _MASK))
    return value >> 1


def _mix(value: int) -> int:
    """Return the SplitMix64 output for a state.

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators.
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class ForwardStream:
    """The random stream of dropout and the like: torch's global generators, reseeded before each forward pass.

    The draws in a forward pass therefore do not depend on what any other code drew before. Each rank has its own seed.
    `counters` distinguish several streams of one consumer.
    """

    def __init__(self, seed: int, device: torch.device, name: str = "forward", *counters: int) -> None:
        self._base = stream_seed(seed, name, *counters)
        self._seed_cpu = torch.default_generator.manual_seed
        self._seed_device: Callable[[int], Any] | None = None
        if device.type == "cuda":
            torch.cuda.init()  # creates the generators
            with torch.cuda.device(device):  # without an index: the current device
                index = torch.cuda.current_device()
            self._seed_device = torch.cuda.default_generators[index].manual_seed
        elif device.type not in ("cpu", "meta"):
            self._seed_device = getattr(torch, device.type).manual_seed

    def start(self, batch: int, microbatch: int) -> int:
        """Seed the generators for the forward pass of a microbatch, and return the seed, an unsigned int of 32 bits.

        `batch` counts from the start of training.
        """
        # The CPU's generator mixes its seed well but uses only 32 bits of it: odd multipliers spread the counters.
        seed = (self._base + batch * 0x9E3779B1 + microbatch * 0x85EBCA77) & 0xFFFFFFFF
        self._seed_cpu(seed)
        if self._seed_device is not None:
            self._seed_device(seed)
        return seed


class HookStream(ForwardStream):
    """The random stream of hooks that draw from the global generators: those of torch, Python and numpy."""

    def start(self, batch: int, microbatch: int = 0) -> int:
        """Seed the generators for the hooks that run before the forward pass of a batch."""
        seed = super().start(batch, microbatch)
        random.seed(seed)
        numpy.random.seed(seed)
        return seed


@contextmanager
def restored_generators(device: torch.device) -> Generator[None]:
    """Restore the global generators after a `with` statement: Python's, numpy's, and torch's on CPU and device."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with restored_torch_generators([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
