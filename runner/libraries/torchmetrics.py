"""Import torchmetrics, three times faster than `import torchmetrics`. No other module imports it."""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from runner.libraries.shortcuts import is_enabled
from runner.libraries.torchvision import import_torchvision


def import_torchmetrics() -> ModuleType:
    """Return the `torchmetrics` module, imported without loading `scipy.signal`, `transformers` and `torchvision`.

    torchmetrics imports `scipy.signal`, which takes 0.7 of the 1.1 seconds, only to restore an attribute that newer
    versions lack. It also imports `transformers` and `torchvision`, if installed, for a few names that its text and
    image metrics may need, which takes another second each. Unless these modules are loaded already, stand-ins with
    only these names replace them during the import and are removed afterwards, so that a later import gets the real
    modules.
    """
    package = sys.modules.get("torchmetrics")
    if isinstance(package, _Package):
        package.load()
    if package is not None:
        return package
    with _lean_imports():
        return importlib.import_module("torchmetrics")


def import_metric() -> Any:
    """Return `torchmetrics.Metric` in a tenth of the time; the rest of torchmetrics is loaded when first used.

    Until then, the package in `sys.modules` has not executed its code. Matplotlib, which the class needs for plots, is
    also imported later.
    """
    if not is_enabled("torchmetrics"):
        return import_torchmetrics().Metric
    spec = find_spec("torchmetrics") if "torchmetrics" not in sys.modules else None
    if spec is not None:
        package = module_from_spec(spec)
        package.__class__ = _Package
        vars(package)["_logger"] = logging.getLogger("torchmetrics")  # used by its warnings
        sys.modules["torchmetrics"] = package
        plot = "torchmetrics.utilities.plot"

        def draw(*arguments: Any, **options: Any) -> Any:
            return importlib.import_module(plot).plot_single_or_multi_val(*arguments, **options)

        names = {"plot_single_or_multi_val": draw, "_AX_TYPE": Any, "_PLOT_OUT_TYPE": Any}
        with _replacing_modules({plot: names}):
            importlib.import_module("torchmetrics.utilities")  # first, because the two import each other
            importlib.import_module("torchmetrics.metric")
        del vars(package)["__path__"]  # an import of a module in it needs `__path__`, and so loads the package first
    return importlib.import_module("torchmetrics.metric").Metric


def empty(metric: Any) -> None:
    """Empty a metric's states, but keep their types and dimensions, which must agree when ranks gather them."""
    import torch

    for part in metric.modules():
        for name, values in getattr(part, "metric_state", {}).items():
            if isinstance(values, list) and getattr(part._reductions[name], "__name__", "") == "dim_zero_cat":
                setattr(part, name, [torch.atleast_1d(value)[:0] for value in values[:1]])
            else:
                setattr(part, name, copy.deepcopy(part._defaults[name]))


class _Package(ModuleType):
    """The package before its code has run; a missing attribute makes it run."""

    def load(self) -> None:
        """Run the code, and become an ordinary module."""
        spec: Any = self.__spec__
        self.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
        self.__path__ = spec.submodule_search_locations
        with _lean_imports():
            spec.loader.exec_module(self)

    def __getattr__(self, name: str) -> Any:
        self.load()
        return getattr(self, name)


@contextmanager
def _lean_imports() -> Iterator[None]:
    """Within the context, import torchmetrics without other modules that it seldom needs."""
    if not is_enabled("torchmetrics"):
        if find_spec("torchvision") is not None:
            import_torchvision()  # first, because it copes with operators that do not load
        yield
        return
    # torchmetrics patches the module only if this name is missing.
    stand_ins: dict[str, dict[str, Any]] = {"scipy.signal": {"hamming": None}}
    for name in ("transformers", "torchvision", "torchvision.models"):
        if (spec := find_spec(name.partition(".")[0])) is not None:
            stand_ins[name] = {"__getattr__": partial(_lazy_name, name), "__spec__": spec}
    with _replacing_modules(stand_ins):
        yield


@contextmanager
def _replacing_modules(stand_ins: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Within the context, put stand-ins for modules that are not loaded yet into `sys.modules`."""
    missing = [name for name in stand_ins if name not in sys.modules]
    for name in missing:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(stand_ins[name])
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


class _LazyName:
    """A class, function or module of a library, imported when it is called or one of its attributes is used."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def _load(self) -> Any:
        if find_spec("torchvision") is not None:
            import_torchvision()  # transformers imports it too
        return getattr(importlib.import_module(self._module), self._name)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._load(), attribute)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._load()(*arguments, **options)


def _lazy_name(module: str, name: str) -> _LazyName:
    if name.startswith("__"):
        raise AttributeError(name)
    return _LazyName(module, name)
