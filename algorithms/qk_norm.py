"""QK norm: queries and keys are normalized, so that attention cannot grow without bounds."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate


def normalize(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """Return queries or keys divided by the root of their mean square, times a scale.

    Args:
        x: (..., D).
        scale: (D,), or None for 1.
        eps: added to the mean square.

    Returns:
        (..., D), in x's dtype, which is autocast's where that is on.
    """
    return F.rms_norm(x, x.shape[-1:], None if scale is None else scale.to(x.dtype), eps)


class _HeadNorm(nn.RMSNorm):
    """`normalize` with a scale of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return queries or keys (N, H, T, D / H), normalized."""
        return normalize(x, self.weight, self.eps or 0.0)


def find_seams(model: nn.Module) -> dict[nn.Module, int]:
    """Return what stands in a model where queries and keys could be normalized, with the width of a head.

    These are identities called `q_norm` and `k_norm` in a module that knows its `head_dim`, as in this project's GPT
    and timm's vision transformers.
    """
    seams: dict[nn.Module, int] = {}
    for attention in model.modules():
        head_dim = getattr(attention, "head_dim", None)
        for name in ("q_norm", "k_norm"):
            seam = getattr(attention, name, None)
            if isinstance(head_dim, int) and isinstance(seam, nn.Identity):
                seams[seam] = head_dim
    return seams


class QKNorm(Algorithm):
    """Divides each head's queries and keys by their root mean square.

    The products of the two are then bounded by the square root of a head's width, times what is learned. There is
    nothing random, and nothing that depends on ranks or microbatches.

    Args:
        learned_scale: whether each number of queries and keys has a factor to learn, 1 at the start.
        eps: added to the mean square, above 0.
        allow_no_match: leave a model without such attention as it is, rather than refuse it.

    Raises:
        ValueError: eps is out of range; at INIT, there is nowhere to put it in the model.

    Evidence:
        Strong for stable training with large learning rates (Henry et al. 2020, "Query-Key Normalization for
        Transformers", arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442); some for a lower loss.
    """

    def __init__(self, learned_scale: bool = True, eps: float = 1e-6, allow_no_match: bool = False) -> None:
        if isinstance(eps, bool) or not eps > 0:
            raise ValueError(f"eps={eps!r}: must be a number above 0")
        self.learned_scale = learned_scale
        self.eps = eps
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        seams = find_seams(state.unwrapped_model)

        def norm(module: nn.Module, index: int) -> nn.Module:
            return _HeadNorm(seams[module], eps=self.eps, elementwise_affine=self.learned_scale)

        operate(self, state, {seams.__contains__: norm}, "attention with q_norm and k_norm", self.allow_no_match)
