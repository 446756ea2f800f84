"""Random generators that a data set keeps as its own: found by a bounded search, and seeded for each sample.

The global generators of Python, numpy and torch are seeded for each sample anyway. A `numpy.random.default_rng()`, a
`random.Random()` or a `torch.Generator()` in an attribute would go on from sample to sample instead: each worker
process has a copy, so samples would repeat each other's draws, and would be others after a resume.
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
"""How many objects are looked at; a transform is near its data set."""
MOST_ITEMS = 100
"""The length up to which a container is searched; longer ones hold data."""

_GENERATORS = (
    random.Random,
    numpy.random.Generator,
    numpy.random.RandomState,
    numpy.random.BitGenerator,
    torch.Generator,
    numpy.random.SeedSequence,  # spawn() counts on, and the count cannot be set
    torch.quasirandom.SobolEngine,
)
_LEAVES = (str, bytes, int, float, complex, type(None), ModuleType, type, torch.Tensor, numpy.ndarray)


class OwnGenerators:
    """The generators that a data set and what it refers to have for themselves.

    Args:
        roots: the objects to search, by name.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self._is_new = True
        self._prepared: list[tuple[Callable[[int], Any], list[int]]] = []
        self._search()

    def _search(self) -> None:
        found = {path: (one, _seeder(one)) for path, one in find_generators(self._roots)}
        self._generators = [one for one, seed in found.values() if seed is not None]
        self._seeders = {path: seed for path, (_, seed) in found.items() if seed is not None}

    def were_made_meanwhile(self) -> bool:
        """Return whether reading the first sample, for which this is to be called, made generators; later, False."""
        if not self._is_new:
            return False
        self._is_new = False
        before = self._seeders.keys()
        self._search()
        return not self._seeders.keys() <= before

    def prepare(self, seed: int, epoch: int, indices: numpy.ndarray[Any, Any]) -> None:
        """Draw the seeds for samples, given their numbers `(n,)`, uint64; each generator has a stream of its own."""
        self._prepared = [
            (start, stream_seed(seed, f"sample/{path}", epoch, indices).tolist())
            for path, start in self._seeders.items()
        ]

    def start(self, position: int) -> None:
        """Seed the generators for one of the samples."""
        for seed, values in self._prepared:
            seed(values[position])

    def states(self) -> list[Callable[[], Any]]:
        """Return functions that put the generators back to where they are now."""
        return [_restorer(one) for one in self._generators]


def warn_of_unseeded(loader: Any, name: str) -> None:
    """Warn, once and on rank 0, of generators from which a loader may draw numbers that the run's seed does not decide.

    `name` is what users call the loader.
    """
    if get_global_rank() == 0 and (paths := unseeded(loader)):
        _warn(
            f"{name}: nothing seeds the random generator {', '.join(paths[:3])}{', ...' if paths[3:] else ''}. If "
            "batches draw from it, workers repeat each other's draws and a resumed run has others: read the data set "
            "with runner.data.DatasetLoader, which seeds generators of data sets, or draw from torch's global one"
        )


@cache  # once a process
def _warn(text: str) -> None:
    log.warning(text)


def unseeded(loader: Any) -> list[str]:
    """Return the paths of the generators of a loader that are seeded neither for each sample nor for each batch."""
    if hasattr(loader, "order"):
        read = find_generators({"dataset": getattr(loader, "dataset", None)})
        transforming = find_generators({"transform": getattr(loader, "transform", None)})
        return [path for path, _ in transforming] + [path for path, one in read if _seeder(one) is None]
    if hasattr(loader, "state_dict"):
        return []  # it may well save them
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)
    seeded = {id(getattr(one, "generator", None)) for one in owners}  # for each epoch
    return [path for path, one in find_generators({"loader": loader}) if id(one) not in seeded]


def find_generators(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the generator for each that can be reached from objects, apart from the global ones.

    Attributes, containers, partials, methods, closures and suspended generator functions are followed; in the user's
    own code also class attributes and the global variables that functions name.
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
    """Yield what an object refers to, with the end of its path. Nothing is called that a user may have overridden."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in [*value.items()]) if len(value) <= MOST_ITEMS else ()
    elif isinstance(value, list | tuple):  # no sets, whose order differs between processes
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
    """Yield the names that a function looks up, those of comprehensions and functions in it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _attribute(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except (AttributeError, ValueError):  # it is not set, or the variable of a closure is not
        return None


def _function_in(part: Any) -> Any:
    """Return the function in what a class has by a name, or the value itself."""
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
