"""Make the optimizers and schedulers that a run steps from those that the user gave."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runner.optim.scheduled_rates import ScheduledRates
from runner.schedulers import Schedule
from runner.time import Progress

OptimizerFactory = Callable[[Any], Optimizer]
"""Called with a list of parameters, or with the model itself if its first argument is named `model`."""
Optimizers = OptimizerFactory | Optimizer | Mapping[str, OptimizerFactory] | Sequence[Optimizer] | None


def existing_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return what was given as optimizers, rather than as factories of them."""
    given = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    return [one for one in given if isinstance(one, Optimizer)]


def make_optimizers(optimizers: Any, model: nn.Module) -> list[Optimizer]:
    """Return a list of optimizers over the model's parameters as they are now, in the order given.

    Args:
        optimizers: a factory from parameters to an optimizer (or from the model, if its first argument is named
            `model`), an optimizer or a list of them, a dict of factories by the name of the submodule whose parameters
            they get, or None.
        model: the model after INIT.

    Raises:
        TypeError: an entry is neither an optimizer nor a factory of one, or needs a closure to step.
        ValueError: an optimizer holds parameters that the model does not have, or that another optimizer holds too; or
            a key names no submodule.
    """
    if optimizers is None:
        return []
    if isinstance(optimizers, Mapping):
        made = [_make(one, _submodule(model, key), f"optimizers[{key!r}]") for key, one in optimizers.items()]
    elif isinstance(optimizers, list | tuple):
        made = [_make(one, model, "optimizers") for one in optimizers]
    else:
        made = [_make(optimizers, model, "optimizers")]
    for one in made:
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(f"optimizers={type(one).__name__}: needs a closure to step, which a run cannot give it")
        _check_parameters(one, model)
    held = [id(parameter) for one in made for group in one.param_groups for parameter in group["params"]]
    if shared := len(held) - len({*held}):
        twice = f"{shared} parameters are in several of them, which would each step them"
        raise ValueError(f"optimizers: {twice} (weights that submodules share?); give these to one")
    return made


def _make(source: Any, module: nn.Module, name: str) -> Optimizer:
    if isinstance(source, Optimizer):
        return source
    if not callable(source):
        raise TypeError(
            f"{name}={source!r}: must be an optimizer, or a factory such as `lambda params: AdamW(params, lr=1e-3)`"
        )
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"{name}: the model has no trainable parameter to optimize")
    takes_model = next(iter(inspect.signature(source).parameters), None) == "model"
    optimizer = source(module if takes_model else parameters)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{name}: the factory returned a {type(optimizer).__name__}; it must return a torch optimizer")
    return optimizer


def _submodule(model: nn.Module, name: str) -> nn.Module:
    children = dict(model.named_children())
    if name not in children:
        raise ValueError(f"optimizers={name!r}: the keys must name submodules of the model, which are {[*children]}")
    return children[name]


def _check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        raise ValueError(
            f"optimizers={type(optimizer).__name__}: {foreign} of its parameters are not in the model (an algorithm "
            "may have replaced them at INIT). Give a factory, `lambda params: ...`, which is called after INIT."
        )


class Schedulers(NamedTuple):
    """What sets learning rates, by when it acts."""

    rates: list[ScheduledRates]
    """Set the rate before each batch, from the batch's own timestamp."""
    stepped: list[Any]
    """torch's own, stepped after each batch or epoch."""


def make_schedulers(
    schedulers: Any, optimizers: Sequence[Optimizer], progress: Progress, ratio: float, scale_warmup: bool
) -> Schedulers:
    """Return schedulers bound to every optimizer.

    Args:
        schedulers: a schedule of `runner.schedulers`, a factory from an optimizer to a torch scheduler, a list of
            one kind, or None.
        optimizers: the optimizers whose rates are set.
        progress: tells the length of the run, against which the schedules' lengths are checked.
        ratio: factor of the schedules' lengths, `scale_schedule_ratio`.
        scale_warmup: whether the factor applies to warm-ups too.

    Raises:
        TypeError: an entry is neither a schedule nor a factory, or needs a metric to step.
        ValueError: a schedule does not fit into the run, or schedules of both kinds are given.
    """
    given = [] if schedulers is None else schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    schedules = [one.scaled(ratio, scale_warmup) for one in given if isinstance(one, Schedule)]
    for schedule in schedules:
        schedule.bind(progress.max_duration, progress.batches_per_epoch)  # raises where they do not fit
    stepped = []
    for one in given:
        if isinstance(one, Schedule):
            continue
        if not callable(one):
            raise TypeError(
                f"schedulers={one!r}: must be a schedule of runner.schedulers, or a factory from an optimizer to a "
                "torch scheduler, such as `lambda optimizer: StepLR(optimizer, 10)`"
            )
        stepped += [one(optimizer) for optimizer in optimizers]
        if not hasattr(stepped[-1], "step"):
            raise TypeError(f"schedulers={one!r} returned a {type(stepped[-1]).__name__}, which has no step()")
        if isinstance(stepped[-1], ReduceLROnPlateau):
            raise TypeError(f"schedulers={one!r}: ReduceLROnPlateau needs a metric to step, which a run cannot give it")
    if schedules and stepped:
        raise ValueError(f"schedulers={given!r}: schedules of runner.schedulers and torch's would undo one another")
    return Schedulers([ScheduledRates(one, schedules) for one in optimizers] if schedules else [], stepped)
