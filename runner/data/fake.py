"""Loaders of made-up batches, to check a run on a machine that does not have the data.

A data function returns training, evaluation and test loaders. Its attribute `fake`, set by the decorator `faked_by`,
is a function of the same arguments that returns loaders of the same lengths without reading anything. These loaders may
be any iterables of batches, even a list of one batch.
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
    """The arguments of a data function; they make its loaders.

    A method `fake()`, if there is one, returns loaders of the same lengths, with made-up batches.
    """

    def load(self) -> Loaders:
        """Return the loaders."""
        ...


class FakeLoader(OrderedLoader):
    """A loader of made-up batches that replaces another, with batches of the same number and sizes.

    Args:
        make: `make(n)` returns a batch of n samples, with the shapes, types and ranges of real ones.
        num_samples: size of the data set that it replaces.
        batch_size: samples in a global batch, all ranks together.

    Raises:
        TypeError, ValueError: `SampleOrder` refuses the sizes.
    """

    is_fake = True  # so checkpoints do not record its order of samples
    is_multi_label = False  # whether the samples have any number of classes

    def __init__(self, make: Callable[[int], Any], num_samples: int, batch_size: int) -> None:
        super().__init__(SampleOrder(num_samples, batch_size, shuffle=False))
        self.make = make

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        for number in range(first, len(self.order)):
            start, stop = self.order.span(number)
            yield self.make(stop - start)


def faked_by(fake: Callable[..., Any]) -> Callable[[Load], Load]:
    """Return a decorator that sets the attribute `fake` of a data function.

    Args:
        fake: called with all arguments of the data function by name, including defaults; returns loaders as it does.
    """

    def mark(load: Load) -> Load:
        signature = inspect.signature(load)

        def with_defaults(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return fake(**bound.arguments)

        vars(load)["fake"] = with_defaults
        return load

    return mark


def data_function(name: str, arguments: Callable[P, DataArguments[Loaders]]) -> Callable[P, Loaders]:
    """Return a data function with the arguments and the docstring of a dataclass, and with any attribute `fake` of it.

    Data functions that share many arguments declare them once, in a dataclass that their own dataclasses inherit from.
    """

    def load(*args: P.args, **kwargs: P.kwargs) -> Loaders:
        return arguments(*args, **kwargs).load()

    def fake(*args: P.args, **kwargs: P.kwargs) -> tuple[FakeLoader, ...]:
        return arguments(*args, **kwargs).fake()  # type: ignore[attr-defined]

    hints = get_type_hints(arguments, include_extras=True)
    signature = inspect.signature(arguments)
    parameters = [parameter.replace(annotation=hints[key]) for key, parameter in signature.parameters.items()]
    load.__name__ = load.__qualname__ = name
    load.__module__ = arguments.__module__
    load.__doc__ = arguments.__doc__
    load.__annotations__ = {key: hints[key] for key in signature.parameters}
    vars(load)["__signature__"] = signature.replace(parameters=parameters)
    if hasattr(arguments, "fake"):
        vars(load)["fake"] = fake
    return load
