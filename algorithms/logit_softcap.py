"""Logit soft-capping: logits are bounded smoothly."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate
from runner.failures.checks import check_number


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) for logits x (...), always between -cap and cap.

    Since tanh(u) = u - u^3 / 3 + ..., small logits stay almost unchanged. The derivative 1 - tanh(x / cap)^2 is
    positive everywhere, so that, unlike with clipping, large logits still get gradients.
    """
    return cap * torch.tanh(logits / cap)


class _CappedLinear(nn.Linear):
    """A linear layer with capped outputs, which takes over another layer's parameters and their names.

    Args:
        linear: linear layer to replace.
        cap: largest magnitude of an output, see `softcap`.
    """

    def __init__(self, linear: nn.Linear, cap: float) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.cap = cap

    def forward(self, input: Tensor) -> Tensor:
        """Return the capped outputs (..., out_features)."""
        return softcap(F.linear(input, self.weight, self.bias), self.cap)


class LogitSoftcap(Algorithm):
    """Caps the outputs of a model's head, in training, in evaluation and in exported models.

    Names of weights stay, and a head stays tied to the embedding. Nothing is random or depends on ranks or
    microbatches.

    Args:
        cap: largest magnitude of a logit, above 0.
        head: shell pattern for the names of the linear layers that return logits; '*head' matches 'module.head' and
            'module.lm_head'.
        allow_no_match: whether to leave a model without such a layer unchanged instead of raising an error.

    Raises:
        ValueError: the cap is not above 0; or, at INIT, the model has no such layer.

    Evidence:
        Some, for stable training (Gemma Team 2024, "Gemma 2", arXiv:2408.00118, cap 30) and in speed runs of small
        language models (cap 15). In training on few tokens, logits hardly reach the cap, and nothing is gained.
    """

    runs_before = ("Factorize",)

    def __init__(self, cap: float = 30.0, head: str = "*head", allow_no_match: bool = False) -> None:
        check_number("cap", cap, "(0, inf]")
        self.cap = cap
        self.head = head
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        named = state.unwrapped_model.named_modules()
        heads = {layer for name, layer in named if type(layer) is nn.Linear and fnmatchcase(name, self.head)}

        def replace(linear: nn.Module, index: int) -> nn.Module:
            assert isinstance(linear, nn.Linear)
            return _CappedLinear(linear, self.cap)

        target = f"linear layer with a name like {self.head!r}"
        operate(self, state, {heads.__contains__: replace}, target, self.allow_no_match)
