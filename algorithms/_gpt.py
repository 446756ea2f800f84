"""What the algorithms that replace a GPT's learned positions share."""

from __future__ import annotations

from torch import nn

from runner.models import GPT


def drop_positions(module: nn.Module, index: int) -> None:
    """Remove a GPT's learned positions in place; a policy for `replace_modules` that keeps the module itself."""
    assert isinstance(module, GPT)
    module.position_embedding = None
