"""What the algorithms that tell positions do to a GPT."""

from __future__ import annotations

from torch import nn

from runner.models import GPT


def drop_positions(module: nn.Module, index: int) -> None:
    """Take the learned positions from a GPT, which stays as it is otherwise: a policy for `replace_modules`."""
    assert isinstance(module, GPT)
    module.position_embedding = None
