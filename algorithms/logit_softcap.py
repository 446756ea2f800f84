"""Logit soft-capping: logits are bent smoothly into an interval."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return cap tanh(x / cap) of logits (...): about x where x is small, and always between -cap and cap."""
    return cap * torch.tanh(logits / cap)


class _CappedLinear(nn.Linear):
    """A linear layer whose outputs are capped; it takes over the parameters of another, and their names.

    Args:
        linear: whose place it takes.
        cap: see `softcap`.
    """

    def __init__(self, linear: nn.Linear, cap: float) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.cap = cap

    def forward(self, input: Tensor) -> Tensor:
        """Return the capped outputs (..., out_features)."""
        return softcap(F.linear(input, self.weight, self.bias), self.cap)


class LogitSoftcap(Algorithm):
    """Caps what the head of a model returns, in training, evaluation and whatever is exported.

    Weights keep their names, and a head stays tied to the embedding. There is nothing random, and nothing that depends
    on ranks or microbatches.

    Args:
        cap: largest size of a logit, above 0.
        head: shell pattern of names of linear layers that return logits: 'module.head' and 'module.lm_head' fit.
        allow_no_match: leave a model without such a layer as it is, rather than refuse it.

    Raises:
        ValueError: the cap is out of range; at INIT, the model has no such layer.

    Evidence:
        Some, for stable training (Gemma Team 2024, "Gemma 2", arXiv:2408.00118, cap 30) and in speed runs of small
        language models (cap 15); with few tokens logits hardly reach the cap, and nothing is gained.
    """

    runs_before = ("Factorize",)

    def __init__(self, cap: float = 30.0, head: str = "*head", allow_no_match: bool = False) -> None:
        if isinstance(cap, bool) or not cap > 0:
            raise ValueError(f"cap={cap!r}: must be a number above 0")
        self.cap = cap
        self.head = head
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        named = state.unwrapped_model.named_modules()
        heads = {one for name, one in named if type(one) is nn.Linear and fnmatchcase(name, self.head)}

        def replace(linear: nn.Module, index: int) -> nn.Module:
            assert isinstance(linear, nn.Linear)
            return _CappedLinear(linear, self.cap)

        wanted = f"linear layer with a name like {self.head!r}"
        operate(self, state, {heads.__contains__: replace}, wanted, self.allow_no_match)
