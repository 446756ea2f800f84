"""Rotary positions: queries and keys are rotated by angles, so that attention sees the distance between two tokens.

Write R(a) for the rotation of a pair of features by the angle a. Rotations keep lengths and add up, so the product of a
query q at position m and a key k at position n is (R(m f) q) . (R(n f) k) = q . R((n - m) f) k: it depends on the
distance n - m alone. Each pair has its own frequency f, so that some turn fast, for near tokens, and some slowly, for
distant ones. Source: Su et al. 2021, arXiv:2104.09864; pairs are (i, i + D / 2) as in most models, not (2 i, 2 i + 1).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._gpt import ShapeCache, drop_positions
from runner.algorithms._surgery import operate
from runner.failures.checks import check_number
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
    return turn(x, *make_tables(x, base))


def make_tables(x: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Return the factors for `turn`, two tensors (T, D) in at least float32; takes the arguments of `rotate`.

    Returns:
        The cosine of each element's angle, and its sine, negative in the first half.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** -(torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=dtype)[:, None] * frequencies
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys (..., T, D) rotated by the angles of `make_tables`."""
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


class _Rotary(nn.Module):
    """`rotate` as a module.

    Args:
        tables: the tables of `make_tables`.
    """

    def __init__(self, tables: ShapeCache[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, x: Tensor) -> Tensor:
        """Return rotated queries or keys (N, H, T, D / H)."""
        return turn(x, *self.tables.get(x))


class RotaryEmbedding(Algorithm):
    """Replaces a GPT's learned positions with rotary ones; applied after `QKNorm` if both are used.

    The model then has no maximum sequence length, but it does not generalize to longer sequences than it was trained
    on. Works with the GPT of this project. Nothing is random or depends on ranks or microbatches.

    Args:
        base: base of the frequencies, above 1; a larger base makes the slowest angle slower, for longer sequences.
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
        check_number("base", base, "(1, inf]")
        self.base = base
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        attentions = [module for module in state.unwrapped_model.modules() if isinstance(module, Attention)]
        for attention in attentions:
            if attention.head_dim % 2:
                raise ValueError(
                    f"RotaryEmbedding rotates pairs of numbers, but the model's heads have an odd width, "
                    f"{attention.head_dim}: choose d_model and n_heads such that d_model / n_heads is even"
                )
        placeholders = {attention.rotary for attention in attentions}
        tables = ShapeCache(partial(make_tables, base=self.base))
        policies = {GPT: drop_positions, placeholders.__contains__: lambda module, index: _Rotary(tables)}
        operate(self, state, policies, "attention of runner.models.GPT", self.allow_no_match)
