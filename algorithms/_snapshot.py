"""Copies of what training changes, and how they are put back: the buffers before a batch, and the whole model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from runner import State


class KeptBuffers:
    """A model's buffers as they were before a batch, which the forward pass may have changed or replaced.

    Args:
        model: after INIT.
    """

    def __init__(self, model: nn.Module) -> None:
        paths = [(name, *name.rpartition(".")[::2]) for name, _ in model.named_buffers()]
        self._places = [(name, model.get_submodule(owner), attribute) for name, owner, attribute in paths]
        self._kept: list[tuple[Tensor, Tensor]] = []

    def keep(self) -> None:
        """Copy them all: which of them a forward pass changes is not known before it."""
        buffers = [getattr(module, attribute) for _, module, attribute in self._places]
        self._kept = [(buffer, buffer.clone()) for buffer in buffers]

    def put_back(self) -> None:
        """Undo what happened to them since `keep`."""
        for (_, module, attribute), (buffer, value) in zip(self._places, self._kept, strict=True):
            buffer.copy_(value)
            setattr(module, attribute, buffer)

    def values(self) -> dict[str, Tensor]:
        """Return the copies, by name; nobody changes them any more."""
        return {name: value for (name, *_), (_, value) in zip(self._places, self._kept, strict=True)}


def take_snapshot(state: State, buffers: dict[str, Tensor]) -> dict[str, Any]:
    """Return a copy of the trained weights and of the optimizers' state, with the given buffers, on the same device."""
    parameters = state.unwrapped_model.named_parameters()
    return {
        "batch": state.timestamp.batch,
        "weights": {name: one.detach().clone() for name, one in parameters if one.requires_grad} | buffers,
        "optimizers": [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in state.optimizers],
    }


@torch.no_grad()
def roll_back(state: State, snapshot: dict[str, Any]) -> None:
    """Put back what `take_snapshot` copied; learning rates stay, for schedules go on."""
    model = state.unwrapped_model
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, value in snapshot["weights"].items():
        live[name].copy_(value)
    for optimizer, its in zip(state.optimizers, snapshot["optimizers"], strict=True):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": copy.deepcopy(its)})
