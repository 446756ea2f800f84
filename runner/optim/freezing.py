"""Parameters and modules that training leaves alone: which are frozen, and which gradients no optimizer uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from runner.distributed.ranks import get_global_rank

log = logging.getLogger("runner")


def describe_freezing(model: nn.Module) -> dict[str, list[str] | None]:
    """Return the names of frozen parameters, and of modules in evaluation mode: None if that is the whole model."""
    modules = [name for name, one in model.named_modules() if not one.training] if model.training else None
    return {"parameters": [name for name, one in model.named_parameters() if not one.requires_grad], "modules": modules}


def restore_freezing(model: nn.Module, frozen: Mapping[str, Sequence[str] | None]) -> None:
    """Freeze and unfreeze the parameters of a model, and set the modes of its modules, as `describe_freezing` says."""
    parameters = {*(frozen["parameters"] or ())}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad == (name in parameters):
            parameter.requires_grad_(name not in parameters)
    if (modules := frozen["modules"]) is not None:
        for name, module in model.named_modules():
            module.training = name not in modules


class Freezing:
    """Follows which parameters of a model are trained, which hooks may change.

    Attributes:
        is_new: whether the gradients of the parameters that are trained now have not been looked at yet.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.is_new = True
        self._model = model
        self._optimizers = optimizers
        self._trained = _trained_of(model)

    def has_changed(self) -> bool:
        """Return whether other parameters are trained than at the last call: unfrozen, added, or replaced."""
        before = self._trained
        self._trained = _trained_of(self._model)
        self.is_new |= self._trained != before
        return self._trained != before

    def check_gradients(self) -> None:
        """Warn of parameters that have a gradient, but that no optimizer steps. Call it after a batch."""
        self.is_new = False
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        held = {id(one) for group in groups for one in group["params"]}
        parameters = self._model.named_parameters()
        idle = [name for name, one in parameters if one.grad is not None and id(one) not in held]
        if idle and get_global_rank() == 0:
            remedy = "give them to an optimizer, or freeze them with requires_grad_(False)"
            log.warning("not trained, as no optimizer has them, but with a gradient: %s; %s", listed(idle), remedy)


def _trained_of(model: nn.Module) -> list[int]:
    """Return the identities of the parameters that are trained; a parameter put in another's place has its own."""
    return [id(one) for one in model.parameters() if one.requires_grad]


def listed(names: Sequence[str]) -> str:
    """Return the first names of many, for a message."""
    return ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)
