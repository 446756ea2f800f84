"""Frozen parameters, modules in evaluation mode, and gradients that no optimizer uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from runner.distributed.ranks import get_global_rank

log = logging.getLogger("runner")


def describe_freezing(model: nn.Module) -> dict[str, list[str] | None]:
    """Return the names of frozen parameters, and of modules in evaluation mode, or None if the whole model is in it."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    in_eval = [name for name, module in model.named_modules() if not module.training]
    return {"parameters": frozen, "modules": in_eval if model.training else None}


def restore_freezing(model: nn.Module, frozen: Mapping[str, Sequence[str] | None]) -> None:
    """Freeze and unfreeze parameters and set the modes of modules, as recorded by `describe_freezing`."""
    parameters = {*(frozen["parameters"] or ())}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad == (name in parameters):
            parameter.requires_grad_(name not in parameters)
    if (modules := frozen["modules"]) is not None:
        for name, module in model.named_modules():
            module.training = name not in modules


class Freezing:
    """Tracks which parameters of a model are trained: hooks may freeze, unfreeze, add or replace parameters.

    Attributes:
        needs_check: whether `check_gradients` is still due for the current set of trained parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.needs_check = True
        self._model = model
        self._optimizers = optimizers
        self._trained = _trained_ids(model)

    def has_changed(self) -> bool:
        """Return whether the set of trained parameters has changed since the last call."""
        previous = self._trained
        self._trained = _trained_ids(self._model)
        self.needs_check |= self._trained != previous
        return self._trained != previous

    def check_gradients(self) -> None:
        """Warn of parameters that have a gradient but belong to no optimizer. Call it after a batch."""
        self.needs_check = False
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        with_gradient = [item for item in self._model.named_parameters() if item[1].grad is not None]
        unheld = [name for name, parameter in with_gradient if id(parameter) not in held]
        if unheld and get_global_rank() == 0:
            remedy = "give them to an optimizer, or freeze them with requires_grad_(False)"
            names = listed(unheld)
            log.warning("these parameters have a gradient, but no optimizer trains them: %s; %s", names, remedy)


def _trained_ids(model: nn.Module) -> list[int]:
    """Return the ids of the trained parameters, which also reveal a parameter that replaced another."""
    return [id(parameter) for parameter in model.parameters() if parameter.requires_grad]


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first five, and the number of the others."""
    return ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)
