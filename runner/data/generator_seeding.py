"""Find the random generators that a data set holds, by a bounded search, and seed them for each sample.

The global generators of Python, numpy and torch are seeded for each sample anyway. Without this module, a
`numpy.random.default_rng()`, `random.Random()` or `torch.Generator()` in an attribute would continue from sample to
sample: as each worker has a copy, samples would repeat each other's draws, and would change after a resume.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import BuiltinMethodType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy
import torch

from runner.core.randomness import stream_seed
from runner.distributed.ranks import get_global_rank
from runner.failures.tracebacks import is_of_user

log = logging.getLogger("runner")

MOST_OBJECTS = 5_000
"""Number of objects to search; transforms are close to their data set."""
MOST_ITEMS = 100
"""Maximum length of a container to search; longer ones hold data."""

_GENERATORS = (
    random.Random,
    numpy.random.Generator,
    numpy.random.RandomState,
    numpy.random.BitGenerator,
    torch.Generator,
    numpy.random.SeedSequence,  # spawn() increments a count that cannot be set
    torch.quasirandom.SobolEngine,
)
_LEAVES = (str, bytes, int, float, complex, type(None), ModuleType, type, torch.Tensor, numpy.ndarray)


class OwnGenerators:
    """The generators that can be reached from a data set.

    Args:
        roots: the objects to search, by name.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self._is_first = True
        self._prepared: list[tuple[Callable[[int], Any], list[int]]] = []
        self._search()

    def _search(self) -> None:
        pairs = {path: (generator, _seeder(generator)) for path, generator in find_generators(self._roots)}
        self._generators = [generator for generator, seed in pairs.values() if seed is not None]
        self._seeders = {path: seed for path, (_, seed) in pairs.items() if seed is not None}

    def search_again(self) -> bool:
        """After the first sample, search again and return whether there are new generators; later, return False."""
        if not self._is_first:
            return False
        self._is_first = False
        before = self._seeders.keys()
        self._search()
        return not self._seeders.keys() <= before

    def prepare(self, seed: int, epoch: int, indices: numpy.ndarray[Any, Any]) -> None:
        """Derive the seeds for samples from their numbers `(n,)`, uint64; each generator has its own stream."""
        self._prepared = [
            (set_seed, stream_seed(seed, f"sample/{path}", epoch, indices).tolist())
            for path, set_seed in self._seeders.items()
        ]

    def start(self, position: int) -> None:
        """Seed the generators for the sample at a position among the prepared ones."""
        for set_seed, seeds in self._prepared:
            set_seed(seeds[position])

    def states(self) -> list[Callable[[], Any]]:
        """Return functions that restore the current states of the generators."""
        return [_restorer(generator) for generator in self._generators]


def warn_of_unseeded(loader: Any, name: str) -> None:
    """Warn, once and on rank 0, of generators of a loader that the run's seed does not control.

    `name` is what users call the loader.
    """
    if get_global_rank() == 0 and (paths := unseeded(loader)):
        _warn(
            f"{name}: nothing seeds the random generator {', '.join(paths[:3])}{', ...' if paths[3:] else ''}. If "
            "batches draw from it, workers repeat each other's draws and a resumed run has others: read the data set "
            "with runner.data.DatasetLoader, which seeds generators of data sets, or draw from torch's global one"
        )


@cache  # once per process
def _warn(text: str) -> None:
    log.warning(text)


def unseeded(loader: Any) -> list[str]:
    """Return the paths of the generators of a loader that are seeded neither for each sample nor for each batch."""
    if hasattr(loader, "order"):
        reading = find_generators({"dataset": getattr(loader, "dataset", None)})
        transforming = find_generators({"transform": getattr(loader, "transform", None)})
        return [path for path, _ in transforming] + [path for path, value in reading if _seeder(value) is None]
    if hasattr(loader, "state_dict") or hasattr(loader, "order_settings"):
        return []  # it may save them, or seed them itself
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)
    seeded = {id(getattr(owner, "generator", None)) for owner in owners}  # for each epoch
    return [path for path, generator in find_generators({"loader": loader}) if id(generator) not in seeded]


def find_generators(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the object of each random generator that can be reached from the roots, except global ones.

    The search follows attributes, containers, partials, methods, closures and suspended generator functions; in the
    user's own code also class attributes and the global variables that functions use.
    """
    queue = deque(roots.items())
    seen = {id(random.random.__self__), id(numpy.random.random.__self__), id(torch.default_generator)}  # type: ignore[attr-defined]
    while queue and len(seen) < MOST_OBJECTS:
        path, value = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            yield path, value
        else:
            queue.extend((path + name, part) for name, part in _parts(value))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (end of the path, part) for each object that `value` refers to, without calling the user's methods."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in [*value.items()]) if len(value) <= MOST_ITEMS else ()
    elif isinstance(value, list | tuple):  # no sets: their order differs between processes
        yield from ((f"[{index}]", part) for index, part in enumerate(value)) if len(value) <= MOST_ITEMS else ()
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield from (("", value.__self__), ("()", getattr(value, "__func__", None)))
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, GeneratorType):
        yield from ((f":{name}", part) for name, part in (value.gi_frame.f_locals if value.gi_frame else {}).items())
    else:
        for kind in type(value).__mro__:
            names = vars(kind).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                yield f".{name}", _attribute(value, name)
        yield from ((f".{name}", part) for name, part in [*(_attribute(value, "__dict__") or {}).items()])
        for kind in type(value).__mro__:
            if _is_of_user(kind):
                yield from ((f".{name}", _function_in(part)) for name, part in vars(kind).items())


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f":{name}", _attribute(cell, "cell_contents")
    yield from (("()", function.__defaults__), ("()", function.__kwdefaults__), (".__dict__", vars(function)))
    if is_of_user(function.__code__.co_filename) or function.__module__ == "__main__":
        variables = function.__globals__
        yield from ((f":{name}", variables[name]) for name in _names_in(function.__code__) if name in variables)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function looks up, including its comprehensions and inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _attribute(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except (AttributeError, ValueError):  # an attribute or a closure's variable that is not set
        return None


def _function_in(part: Any) -> Any:
    """Return the function in a property, class method or static method; otherwise the value itself."""
    return part.fget if isinstance(part, property) else getattr(part, "__func__", part)


@cache
def _is_of_user(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or is_of_user(getattr(module, "__file__", None) or "")


def _seeder(generator: Any) -> Callable[[int], Any] | None:
    """Return the function that seeds a generator; None if it cannot be seeded."""
    if isinstance(generator, random.SystemRandom | numpy.random.SeedSequence | torch.quasirandom.SobolEngine):
        return None
    if isinstance(generator, random.Random):
        return generator.seed
    if isinstance(generator, torch.Generator):
        return generator.manual_seed
    if isinstance(generator, numpy.random.RandomState):
        if generator.get_state(legacy=False)["bit_generator"] != "MT19937":
            return None
        return lambda seed: generator.seed(seed & 0xFFFFFFFF)
    bits = _bits_of(generator)
    return lambda seed: setattr(bits, "state", type(bits)(seed).state)


def _restorer(generator: Any) -> Callable[[], Any]:
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    bits = _bits_of(generator)
    return partial(setattr, bits, "state", bits.state)


def _bits_of(generator: Any) -> Any:
    return generator if isinstance(generator, numpy.random.BitGenerator) else generator.bit_generator
