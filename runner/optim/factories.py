"""Make the optimizers and schedulers of a run from the user's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn
from torch.optim import Optimizer

from runner.failures.checks import refuse_if
from runner.optim.closures import check_closure
from runner.optim.fused import fuse
from runner.optim.param_groups import OptimizerFactory, call_factory
from runner.optim.scheduled_rates import ScheduledRates
from runner.optim.schedulers import Curve, FunctionSchedule, Schedule
from runner.optim.torch_schedulers import torch_schedulers
from runner.timing.time import Progress

Optimizers = OptimizerFactory | Optimizer | Mapping[str, OptimizerFactory | Optimizer] | Sequence[Optimizer] | None


def existing_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return the optimizers among the user's arguments, without factories."""
    entries = optimizers.values() if isinstance(optimizers, Mapping) else optimizers
    entries = entries if isinstance(entries, Iterable) else [entries]
    return [entry for entry in entries if isinstance(entry, Optimizer)]


def make_optimizers(optimizers: Any, model: nn.Module) -> list[Optimizer]:
    """Return a list of optimizers over the model's current parameters, in the order of the argument.

    On CUDA they use fused kernels if these apply (see `fuse`) and the optimizer's `fused` is None.

    Args:
        optimizers: a factory from parameters to an optimizer (or from the model, if its first argument is named
            `model`), an optimizer or a list of them, a dict of factories by the name of the submodule whose parameters
            they get, or None.
        model: the model after INIT.

    Raises:
        TypeError: an entry is neither an optimizer nor a factory of one, or needs a closure (see `check_closure`).
        ValueError: an optimizer holds parameters that the model does not have or that another optimizer holds too, or a
            key names no submodule.
    """
    if optimizers is None:
        return []
    if isinstance(optimizers, Mapping):
        created = [_make(source, submodule(model, key), f"optimizers[{key!r}]") for key, source in optimizers.items()]
    elif isinstance(optimizers, list | tuple):
        created = [_make(source, model, "optimizers") for source in optimizers]
    else:
        created = [_make(optimizers, model, "optimizers")]
    for optimizer in created:
        check_closure(optimizer, model)
        _check_parameters(optimizer, model)
        fuse(optimizer, model)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    held = [id(parameter) for optimizer in created for group in optimizer.param_groups for parameter in group["params"]]
    held = [parameter_id for parameter_id in held if parameter_id in trained]
    if shared := len(held) - len({*held}):
        reason = f"{shared} parameters are in several of them, which would each step them"
        raise ValueError(f"optimizers: {reason} (weights that submodules share?); give them to one optimizer only")
    return created


def _make(source: Any, module: nn.Module, name: str) -> Optimizer:
    if isinstance(source, Optimizer):
        return source
    needed = "must be an optimizer, or a factory such as `lambda params: AdamW(params, lr=1e-3)`"
    refuse_if(not callable(source), name, source, needed, TypeError)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(f"{name}: the model has no trainable parameter to optimize")
    optimizer = call_factory(source, module)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{name}: the factory returned a {type(optimizer).__name__}; it must return a torch optimizer")
    return optimizer


def submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the submodule with a name such as 'generator' or 'module.head'; raise ValueError if there is none."""
    modules = dict(model.named_modules())
    needed = f"the keys must name submodules of the model, which are {[child for child, _ in model.named_children()]}"
    refuse_if(name not in modules, "optimizers", name, needed)
    return modules[name]


def _check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        raise ValueError(
            f"optimizers={type(optimizer).__name__}: {foreign} of its parameters are not in the model (an algorithm "
            "may have replaced them at INIT, or parallel='fsdp' after it). Give a factory, `lambda params: ...`, which "
            "is called after that."
        )


class Schedulers(NamedTuple):
    """The schedulers of a run, by when they act."""

    rates: list[ScheduledRates]
    """Set the rate before each batch, from the batch's own timestamp."""
    stepped: list[Any]
    """Torch's own schedulers, stepped after each batch or epoch."""


def make_schedulers(
    schedulers: Any, optimizers: Sequence[Optimizer], progress: Progress, ratio: float, scale_warmup: bool
) -> Schedulers:
    """Return schedulers bound to every optimizer.

    Args:
        schedulers: a schedule of `runner.optim.schedulers`; a function from a `Timestamp` to a multiplier, whose first
            argument is named `timestamp`; a torch scheduler, or a factory of one from an optimizer; a list of these,
            either of schedules and functions or of torch schedulers; or None.
        optimizers: the optimizers whose rates are set.
        progress: has the length of the run, against which the schedules' lengths are checked.
        ratio: the factor for the schedules' lengths, `scale_schedule_ratio`.
        scale_warmup: whether the factor applies to warm-ups too.

    Raises:
        TypeError: an entry is of another kind, or needs a metric to step.
        ValueError: a schedule does not fit into the run, schedules of both kinds are given, or a torch scheduler
            belongs to an optimizer that is not in this run.
    """
    entries: Any = [] if schedulers is None else schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    schedules: list[Schedule] = []
    stepped: list[Any] = []
    for entry in entries:
        if isinstance(entry, Schedule):
            schedules.append(entry.scaled(ratio, scale_warmup) if isinstance(entry, Curve) else entry)
        elif callable(entry) and next(iter(inspect.signature(entry).parameters), None) == "timestamp":
            schedules.append(FunctionSchedule(cast(Any, entry)))
        else:
            stepped += torch_schedulers(entry, optimizers)
    for schedule in schedules:
        schedule(progress)  # raises if it does not fit into the run
    mixed = "schedules of runner.optim.schedulers and torch's would undo each other"
    refuse_if(schedules and stepped, "schedulers", entries, mixed)
    return Schedulers([ScheduledRates(optimizer, schedules) for optimizer in optimizers if schedules], stepped)
