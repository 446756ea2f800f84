"""QK norm: queries and keys are normalized, so that attention scores cannot grow without bound."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate
from runner.failures.checks import check_number


def normalize(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """Return queries or keys divided by the root of their mean square, times a scale.

    A vector of D features with a mean square of 1 has the length sqrt(D). The product of a query and a key is therefore
    at most D, and the attention score, which divides it by sqrt(D), at most sqrt(D).

    Args:
        x: queries or keys (..., D).
        scale: factors (D,), or None for 1.
        eps: number added to the mean square.

    Returns:
        Normalized queries or keys (..., D), in x's dtype, which is autocast's if autocast is on.
    """
    return F.rms_norm(x, x.shape[-1:], None if scale is None else scale.to(x.dtype), eps)


class _HeadNorm(nn.RMSNorm):
    """`normalize` with its own learned scale."""

    def forward(self, x: Tensor) -> Tensor:
        """Return normalized queries or keys (N, H, T, D / H)."""
        return normalize(x, self.weight, self.eps or 0.0)


def find_placeholders(model: nn.Module) -> dict[nn.Module, int]:
    """Return the modules of a model that can be replaced to normalize queries and keys, each with the width of a head.

    These are identities named `q_norm` and `k_norm` in a module with a `head_dim`, as in this project's GPT and in
    timm's vision transformers.
    """
    placeholders: dict[nn.Module, int] = {}
    for attention in model.modules():
        head_dim = getattr(attention, "head_dim", None)
        for name in ("q_norm", "k_norm"):
            placeholder = getattr(attention, name, None)
            if isinstance(head_dim, int) and isinstance(placeholder, nn.Identity):
                placeholders[placeholder] = head_dim
    return placeholders


class QKNorm(Algorithm):
    """Divides each head's queries and keys by their root mean square.

    Attention scores are then bounded by the square root of a head's width, times the learned scales. Nothing is random
    or depends on ranks or microbatches.

    Args:
        learned_scale: whether each feature of queries and keys has a learned factor, which starts at 1.
        eps: number added to the mean square, above 0.
        allow_no_match: whether to leave a model without such attention unchanged instead of raising an error.

    Raises:
        ValueError: `eps` is not above 0; or, at INIT, the model has no attention with `q_norm` and `k_norm`.

    Evidence:
        Strong for stable training with large learning rates (Henry et al. 2020, "Query-Key Normalization for
        Transformers", arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442); some for a lower loss.
    """

    def __init__(self, learned_scale: bool = True, eps: float = 1e-6, allow_no_match: bool = False) -> None:
        check_number("eps", eps, "(0, inf]")
        self.learned_scale = learned_scale
        self.eps = eps
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        placeholders = find_placeholders(state.unwrapped_model)

        def norm(module: nn.Module, index: int) -> nn.Module:
            return _HeadNorm(placeholders[module], eps=self.eps, elementwise_affine=self.learned_scale)

        operate(self, state, {placeholders.__contains__: norm}, "attention with q_norm and k_norm", self.allow_no_match)
