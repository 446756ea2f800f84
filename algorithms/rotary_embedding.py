"""Rotary positions: queries and keys are rotated by angles, so that attention sees the distance between two tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._gpt import drop_positions
from runner.algorithms._surgery import operate
from runner.models import GPT
from runner.models.gpt import Attention


def rotate(x: Tensor, base: float) -> Tensor:
    """Return queries or keys with elements i and i + D / 2 at position t rotated by the angle t base^(-2 i / D).

    Args:
        x: queries or keys (..., T, D), D even.
        base: base of the frequencies, above 1; the slowest angle completes a turn in about 2 pi base tokens.

    Returns:
        Rotated queries or keys (..., T, D), in x's dtype; computed in at least float32.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** -(torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=dtype)[:, None] * frequencies
    cos = angles.cos()
    sin = angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class _Rotary(nn.Module):
    """`rotate` as a module.

    Args:
        base: base of the frequencies, see `rotate`.
    """

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        """Return rotated queries or keys (N, H, T, D / H)."""
        return rotate(x, self.base)


class RotaryEmbedding(Algorithm):
    """Replaces a GPT's learned positions with rotary ones; applied after `QKNorm` if both are used.

    The model then has no maximum sequence length, but it does not generalize to longer sequences than it was trained
    on. Works with the GPT of this project. Nothing is random or depends on ranks or microbatches.

    Args:
        base: base of the frequencies, above 1; a larger base slows the slowest angle down, for longer sequences.
        allow_no_match: whether to leave any other model unchanged instead of raising an error.

    Raises:
        ValueError: the base is not above 1; or, at INIT, the model has no such attention, or its heads have an odd
            width.

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
                    f"RotaryEmbedding rotates pairs of numbers, but the model's heads have an odd width, "
                    f"{one.head_dim}: choose d_model and n_heads such that d_model / n_heads is even"
                )
        seams = {one.rotary for one in attentions}
        policies = {GPT: drop_positions, seams.__contains__: lambda module, index: _Rotary(self.base)}
        operate(self, state, policies, "attention of runner.models.GPT", self.allow_no_match)
