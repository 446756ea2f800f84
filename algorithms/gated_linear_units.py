"""Gated linear units: in feed-forward blocks, the activation of one linear layer scales the outputs of another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate
from runner.failures.errors import wrong_argument
from runner.models.surgery import Policy, Selector

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,  # GLU
    "identity": nn.Identity,  # bilinear
    "relu": nn.ReLU,  # ReGLU
    "gelu": nn.GELU,  # GEGLU
    "silu": nn.SiLU,  # SwiGLU
}

# Names of a block's first linear layer and of the activation after it: in this project, in Hugging Face's BERT family,
# and in timm's vision transformers.
PAIRS = (("up", "activation"), ("dense", "intermediate_act_fn"), ("fc1", "act"))


def gated_linear_unit(gates: Tensor, values: Tensor, act_fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return act_fn(gates) * values; all tensors are (..., H)."""
    return act_fn(gates) * values


class _GatedLinear(nn.Module):
    """A gated linear unit with weights, which replaces a linear layer and the activation after it.

    Args:
        linear: linear layer, whose weight becomes that of the gating layer.
        act_fn: the activation function of the gate.
        gated_layer_bias: whether the gating layer has a bias; it takes over that of `linear` if there is one.
        non_gated_layer_bias: whether the other layer has a bias.
    """

    def __init__(
        self,
        linear: nn.Linear,
        act_fn: Callable[[Tensor], Tensor],
        gated_layer_bias: bool,
        non_gated_layer_bias: bool,
    ) -> None:
        super().__init__()
        sizes = linear.in_features, linear.out_features
        self.gated_layer = nn.Linear(*sizes, bias=gated_layer_bias)
        self.gated_layer.weight = linear.weight
        if gated_layer_bias and linear.bias is not None:
            self.gated_layer.bias = linear.bias
        self.non_gated_layer = nn.Linear(*sizes, bias=non_gated_layer_bias)
        # The old weights in random order: this keeps their scale, whatever it is.
        shuffled = linear.weight.detach().flatten()[torch.randperm(linear.weight.numel())]
        self.non_gated_layer.weight = nn.Parameter(shuffled.view_as(linear.weight))
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated outputs (..., H)."""
        return gated_linear_unit(self.gated_layer(x), self.non_gated_layer(x), self.act_fn)


def find_pairs(model: nn.Module) -> dict[nn.Linear, nn.Module]:
    """Return the first linear layer of each feed-forward block of a model, with the activation after it."""
    pairs = {}
    for block in model.modules():
        for first, second in PAIRS:
            linear = getattr(block, first, None)
            activation = getattr(block, second, None)
            if type(linear) is nn.Linear and isinstance(activation, nn.Module):
                pairs[linear] = activation
    return pairs


class GatedLinearUnits(Algorithm):
    """Makes feed-forward blocks gated, in the transformers of this project, Hugging Face's BERT family, and timm.

    act(x W) V becomes (act(x W) * x U) V: W and V stay, and U is drawn from (seed, config key), the same on all ranks.
    The hidden layer keeps its width, so the number of a block's weights grows by half.

    Args:
        act_fn: name of the activation, 'sigmoid' (GLU), 'identity' (bilinear), 'relu' (ReGLU), 'gelu' (GEGLU) or 'silu'
            (SwiGLU), or a function of a tensor; None for the block's own activation.
        gated_layer_bias: whether the layer with the activation keeps the block's bias.
        non_gated_layer_bias: whether the new layer has a bias.
        allow_no_match: whether to leave a model without such blocks unchanged instead of raising an error.

    Raises:
        ValueError: the activation is unknown; or, at INIT, the model has no such block.

    Evidence:
        Strong for language models of equal size (Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202).
        Here blocks get larger, so compare at equal time.
    """

    runs_before = ("Factorize",)

    def __init__(
        self,
        act_fn: str | Callable[[Tensor], Tensor] | None = None,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
        allow_no_match: bool = False,
    ) -> None:
        if not (act_fn is None or callable(act_fn) or act_fn in ACTIVATIONS):
            raise wrong_argument(
                "act_fn",
                act_fn,
                f"must be one of {', '.join(map(repr, ACTIVATIONS))}, a function, or null for the blocks' own "
                "activation",
            )
        self.act_fn = act_fn
        self.gated_layer_bias = gated_layer_bias
        self.non_gated_layer_bias = non_gated_layer_bias
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        pairs = find_pairs(state.unwrapped_model)
        activations = {*pairs.values()}

        def gate(linear: nn.Module, index: int) -> nn.Module:
            assert isinstance(linear, nn.Linear)
            act_fn = pairs[linear] if self.act_fn is None else self.act_fn
            act_fn = ACTIVATIONS[act_fn]() if isinstance(act_fn, str) else act_fn
            return _GatedLinear(linear, act_fn, self.gated_layer_bias, self.non_gated_layer_bias)

        policies: dict[Selector, Policy] = {
            pairs.__contains__: gate,
            activations.__contains__: lambda module, index: nn.Identity(),
        }
        operate(self, state, policies, "feed-forward block", self.allow_no_match)
