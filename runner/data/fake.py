"""Loaders of made-up batches, to check a run on a machine that does not have the data.

A data function returns training, evaluation and test loaders. Its attribute `fake`, set by the decorator `faked_by`,
is a function of the same arguments that returns loaders of the same lengths without reading anything. These loaders may
be any iterables of batches, even a list of one batch.

If new rows can be read without the data, the function also has an attribute `new_rows`. It is a function of the same
arguments that returns a data set, which need not have any rows but has `new_rows(path)`, and the arguments of its
`DatasetLoader`; or None if these arguments do not suffice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, get_type_hints

from runner.data.loaders import OrderedLoader
from runner.data.order import SampleOrder
from runner.data.seeded_batches import Transform

Load = TypeVar("Load", bound=Callable[..., Any])
Loaders = TypeVar("Loaders", covariant=True)
P = ParamSpec("P")


class DataArguments(Protocol[Loaders]):
    """The arguments of a data function; they make its loaders.

    A method `fake()`, if there is one, returns loaders of the same lengths, with made-up batches; for `new_rows()`, see
    the top of this file.
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
        transform: the transform of the loader that it replaces, which is applied to what `make` returns.

    Raises:
        TypeError, ValueError: `SampleOrder` refuses the sizes.
    """

    is_fake = True  # so checkpoints do not record its order of samples
    is_multi_label = False  # whether a sample may have any number of classes

    def __init__(
        self, make: Callable[[int], Any], num_samples: int, batch_size: int, transform: Transform | None = None
    ) -> None:
        super().__init__(SampleOrder(num_samples, batch_size, shuffle=False))
        self.normalization = getattr(transform, "normalization", None)
        self.make = make if transform is None else lambda samples: transform(make(samples))

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        for number in range(first, len(self.order)):
            start, stop = self.order.span(number)
            yield self.make(stop - start)


def faked_by(fake: Callable[..., Any], new_rows: Callable[..., Any] | None = None) -> Callable[[Load], Load]:
    """Return a decorator that sets the attribute `fake` of a data function, and `new_rows` if given.

    Args:
        fake: called with all arguments of the data function by name, including defaults; returns loaders as it does.
        new_rows: called in the same way.
    """

    def mark(load: Load) -> Load:
        signature = inspect.signature(load)

        def with_defaults(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(**bound.arguments)

        functions = {"fake": fake, "new_rows": new_rows}
        vars(load).update({key: partial(with_defaults, value) for key, value in functions.items() if value is not None})
        return load

    return mark


def data_function(name: str, arguments: Callable[P, DataArguments[Loaders]]) -> Callable[P, Loaders]:
    """Return a data function with the arguments and the docstring of a dataclass, and with its `fake` and `new_rows`.

    Data functions that share many arguments declare them once, in a dataclass that their own dataclasses inherit from.
    """

    def load(*args: P.args, **kwargs: P.kwargs) -> Loaders:
        return arguments(*args, **kwargs).load()

    def call(method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(arguments(*args, **kwargs), method)()

    hints = get_type_hints(arguments, include_extras=True)
    signature = inspect.signature(arguments)
    parameters = [parameter.replace(annotation=hints[key]) for key, parameter in signature.parameters.items()]
    load.__name__ = load.__qualname__ = name
    load.__module__ = arguments.__module__
    load.__doc__ = arguments.__doc__
    load.__annotations__ = {key: hints[key] for key in signature.parameters}
    vars(load)["__signature__"] = signature.replace(parameters=parameters)
    vars(load).update({key: partial(call, key) for key in ("fake", "new_rows") if hasattr(arguments, key)})
    return load
