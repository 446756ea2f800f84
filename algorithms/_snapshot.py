"""Copies of training state to roll back to: buffers from before a batch, and weights with optimizer state."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from runner import State
from runner.distributed.sharding import like, like_parameters


class KeptBuffers:
    """Copies of a model's buffers, because a forward pass may change or replace them."""

    def __init__(self, model: nn.Module) -> None:
        paths = [(name, *name.rpartition(".")[::2]) for name, _ in model.named_buffers()]
        self._owners = [(name, model.get_submodule(owner), attribute) for name, owner, attribute in paths]
        self._kept: list[tuple[Tensor, Tensor]] = []

    def keep(self) -> None:
        """Copy all buffers, since a forward pass may change any of them."""
        buffers = [getattr(module, attribute) for _, module, attribute in self._owners]
        self._kept = [(buffer, buffer.clone()) for buffer in buffers]

    def put_back(self) -> None:
        """Restore the buffers as they were at `keep`."""
        for (_, module, attribute), (buffer, value) in zip(self._owners, self._kept, strict=True):
            buffer.copy_(value)
            setattr(module, attribute, buffer)

    def values(self) -> dict[str, Tensor]:
        """Return the copies by name. They never change."""
        return {name: value for (name, *_), (_, value) in zip(self._owners, self._kept, strict=True)}


def take_snapshot(state: State, buffers: dict[str, Tensor]) -> dict[str, Any]:
    """Return copies of the trained weights and the optimizers' state, with the given buffers, on the same device."""
    parameters = state.unwrapped_model.named_parameters()
    return {
        "batch": state.timestamp.batch,
        "weights": {name: weight.detach().clone() for name, weight in parameters if weight.requires_grad} | buffers,
        "optimizers": [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in state.optimizers],
    }


@torch.no_grad()
def roll_back(state: State, snapshot: dict[str, Any]) -> None:
    """Restore what `take_snapshot` copied. Learning rates stay, because schedules continue."""
    model = state.unwrapped_model
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, value in snapshot["weights"].items():
        live[name].copy_(like(value, live[name]))
    for optimizer, tensors in zip(state.optimizers, snapshot["optimizers"], strict=True):
        saved = {**optimizer.state_dict(), "state": copy.deepcopy(tensors)}
        optimizer.load_state_dict(like_parameters(optimizer, saved))
