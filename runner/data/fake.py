"""Stand-ins for data sets, with made-up batches, to check a run on a machine that does not have the data.

A data function, one that returns training, evaluation and test loaders, tells what its batches look like by an
attribute `fake`: a function of the same arguments that returns loaders of the same lengths without reading anything.
The decorator `faked_by` sets it. The loaders may be anything that yields batches, even a list of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar, get_type_hints

from runner.data.loaders import OrderedLoader
from runner.data.order import SampleOrder

Load = TypeVar("Load", bound=Callable[..., Any])
Loaders = TypeVar("Loaders", covariant=True)
P = ParamSpec("P")


class DataArguments(Protocol[Loaders]):
    """The arguments of a data function, which make its loaders and their stand-ins."""

    def load(self) -> Loaders:
        """Return the loaders."""
        ...

    def fake(self) -> tuple[FakeLoader, ...]:
        """Return loaders of the same lengths, with made-up batches."""
        ...


class FakeLoader(OrderedLoader):
    """Made-up batches, as many and as large as those of the loader that it stands in for.

    Args:
        make: `make(n)` -> a batch of n samples, of the shapes, types and ranges of the real ones.
        num_samples: size of the data set that it stands in for.
        batch_size: samples in a global batch, all ranks together.

    Raises:
        TypeError, ValueError: `SampleOrder` refuses the sizes.
    """

    stands_in = True  # for data of another order

    def __init__(self, make: Callable[[int], Any], num_samples: int, batch_size: int) -> None:
        super().__init__(SampleOrder(num_samples, batch_size, shuffle=False))
        self.make = make

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        for number in range(first, len(self.order)):
            start, stop = self.order.span(number)
            yield self.make(stop - start)


def faked_by(fake: Callable[..., Any]) -> Callable[[Load], Load]:
    """Return a decorator for a data function that makes `fake` its stand-in.

    Args:
        fake: called with all arguments of the data function by name, defaults included; returns loaders as it does.
    """

    def mark(load: Load) -> Load:
        signature = inspect.signature(load)

        def with_defaults(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return fake(**given.arguments)

        vars(load)["fake"] = with_defaults
        return load

    return mark


def data_function(name: str, arguments: Callable[P, DataArguments[Loaders]]) -> Callable[P, Loaders]:
    """Return a data function with the arguments and the docstring of a dataclass, and its stand-in.

    Functions with many arguments in common declare them once, in a dataclass that theirs inherit from.
    """

    def load(*args: P.args, **kwargs: P.kwargs) -> Loaders:
        return arguments(*args, **kwargs).load()

    def fake(*args: P.args, **kwargs: P.kwargs) -> tuple[FakeLoader, ...]:
        return arguments(*args, **kwargs).fake()

    hints = get_type_hints(arguments, include_extras=True)
    signature = inspect.signature(arguments)
    parameters = [one.replace(annotation=hints[key]) for key, one in signature.parameters.items()]
    about = {"__name__": name, "__qualname__": name, "__module__": arguments.__module__, "__doc__": arguments.__doc__}
    about["__annotations__"] = {key: hints[key] for key in signature.parameters}
    for key, value in (*about.items(), ("__signature__", signature.replace(parameters=parameters)), ("fake", fake)):
        setattr(load, key, value)
    return load
