"""Rotary positions: queries and keys are turned by angles, so that attention sees how far apart two tokens are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._gpt import drop_positions
from runner.algorithms._surgery import operate
from runner.models import GPT
from runner.models.gpt import Attention


def rotate(x: Tensor, base: float) -> Tensor:
    """Return queries or keys, number i and number i + D / 2 of position t turned by the angle t base^(-2 i / D).

    Args:
        x: (..., T, D), D even.
        base: above 1; the slowest angle makes a turn in about 2 pi base tokens.

    Returns:
        (..., T, D), in x's dtype; computed in at least float32.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** -(torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=dtype)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class _Rotary(nn.Module):
    """`rotate` as a module.

    Args:
        base: see `rotate`.
    """

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        """Return queries or keys (N, H, T, D / H), turned."""
        return rotate(x, self.base)


class RotaryEmbedding(Algorithm):
    """Puts rotary positions in place of a GPT's learned ones; after `QKNorm`, where that is on too.

    The model then has no longest sequence of its own, though it knows no longer ones than it was trained on. For the
    GPT of this project. There is nothing random, and nothing that depends on ranks or microbatches.

    Args:
        base: above 1; the larger, the slower the slowest angle turns, for longer sequences.
        allow_no_match: leave another model as it is, rather than refuse it.

    Raises:
        ValueError: the base is out of range; at INIT, the model has no such attention, or heads of odd width.

    Evidence:
        Strong (Su et al. 2021, "RoFormer", arXiv:2104.09864; in most language models since): a lower loss for the same
        tokens than with learned positions, for small models too.
    """

    runs_after = ("QKNorm",)
    conflicts_with = ("ALiBi",)

    def __init__(self, base: float = 10000.0, allow_no_match: bool = False) -> None:
        if isinstance(base, bool) or not base > 1:
            raise ValueError(f"base={base!r}: must be a number above 1")
        self.base = base
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        attentions = [one for one in state.unwrapped_model.modules() if isinstance(one, Attention)]
        for one in attentions:
            if one.head_dim % 2:
                raise ValueError(
                    f"RotaryEmbedding turns pairs of numbers, but heads of the model have {one.head_dim}: choose "
                    "d_model and n_heads so that each has an even number"
                )
        seams = {one.rotary for one in attentions}
        policies = {GPT: drop_positions, seams.__contains__: lambda module, index: _Rotary(self.base)}
        operate(self, state, policies, "attention of runner.models.GPT", self.allow_no_match)
