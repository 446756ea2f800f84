"""Factorize: a large weight matrix becomes the product of two thin ones."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate, resolve_width
from runner.failures.checks import check_counts


def factorize(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return B and A such that B A is the closest matrix of a given rank, by singular value decomposition.

    The R largest singular values of M = U S V, with their vectors, give the matrix of rank R with the smallest sum of
    squared differences from M (Eckart and Young 1936). Both factors get the root of S, so that they have equal scale:
    B = U sqrt(S), A = sqrt(S) V. At full rank the product is the matrix itself.

    Args:
        matrix: floating-point matrix (M, N).
        rank: rank of the product, at least 1; values above min(M, N) mean full rank.

    Returns:
        B (M, R) and A (R, N), in the matrix's dtype.
    """
    wide = torch.promote_types(matrix.dtype, torch.float32)
    left, values, right = torch.linalg.svd(matrix.to(wide), full_matrices=False)
    roots = values[:rank].sqrt()
    return (left[:, :rank] * roots).to(matrix.dtype), (roots[:, None] * right[:rank]).to(matrix.dtype)


@torch.no_grad()
def factorize_linear(linear: nn.Linear, rank: int) -> nn.Sequential:
    """Return two linear layers with `rank` features between them that together approximate the given one best."""
    b, a = factorize(linear.weight, rank)
    first = nn.Linear(linear.in_features, len(a), bias=False)
    second = nn.Linear(len(a), linear.out_features, bias=False)
    return _join(first, a, second, b, linear)


@torch.no_grad()
def factorize_conv(conv: nn.Conv2d, rank: int) -> nn.Sequential:
    """Return a convolution to `rank` channels and a 1x1 convolution that together approximate the given one best."""
    b, a = factorize(conv.weight.flatten(1), rank)
    first = nn.Conv2d(
        conv.in_channels,
        len(a),
        conv.kernel_size,  # type: ignore[arg-type]
        stride=conv.stride,  # type: ignore[arg-type]
        padding=conv.padding,  # type: ignore[arg-type]
        dilation=conv.dilation,  # type: ignore[arg-type]
        bias=False,
        padding_mode=conv.padding_mode,
    )
    second = nn.Conv2d(len(a), conv.out_channels, 1, bias=False)
    return _join(first, a.unflatten(1, conv.weight.shape[1:]), second, b[:, :, None, None], conv)


def _join(first: nn.Module, a: Tensor, second: nn.Module, b: Tensor, old: nn.Linear | nn.Conv2d) -> nn.Sequential:
    for layer, weight in ((first, a), (second, b)):
        # Not contiguous(), which keeps the strides of dimensions of size 1, and DDP warns about those.
        weight = weight.clone(memory_format=torch.contiguous_format)
        layer.weight = nn.Parameter(weight, requires_grad=old.weight.requires_grad)
    second.bias = old.bias  # type: ignore[assignment]
    return nn.Sequential(first, second)


class Factorize(Algorithm):
    """Replaces large convolutions and linear layers with low-rank ones if that makes them smaller.

    A matrix of M x N weights becomes two with R (M + N) weights, fewer if R < M N / (M + N); a convolution counts as a
    matrix with one row per output channel. Grouped convolutions, layers that share their weight with another layer (a
    tied head), and layers that would not get smaller stay unchanged. Nothing is random or depends on ranks or
    microbatches.

    Args:
        factorize_convs: whether to factorize `Conv2d` layers.
        factorize_linears: whether to factorize `Linear` layers.
        min_channels: smallest number of channels, both in and out, of a convolution to factorize; at least 1.
        latent_channels: number of channels between the two new convolutions; below 1, a fraction of min(input, output
            channels).
        min_features: smallest number of features, both in and out, of a linear layer to factorize; at least 1.
        latent_features: number of features between the two new layers; below 1, a fraction of min(input, output
            features).
        allow_no_match: whether to leave a model without such layers unchanged instead of raising an error.

    Raises:
        ValueError: an argument is out of range, or both kinds of layers are switched off; or, at INIT, the model has no
            such layer.

    Evidence:
        None for faster training to the same accuracy; some for smaller models that lose little (Denton et al. 2014,
        arXiv:1404.0736; Jaderberg et al. 2014, arXiv:1405.3866).
    """

    runs_before = ("WeightStandardization",)

    def __init__(
        self,
        factorize_convs: bool = True,
        factorize_linears: bool = True,
        min_channels: int = 256,
        latent_channels: float = 0.25,
        min_features: int = 256,
        latent_features: float = 128,
        allow_no_match: bool = False,
    ) -> None:
        if not (factorize_convs or factorize_linears):
            raise ValueError("factorize_convs=False and factorize_linears=False: one of them must be True")
        check_counts(min_channels=min_channels, min_features=min_features)
        resolve_width("latent_channels", latent_channels, 1)
        resolve_width("latent_features", latent_features, 1)
        self.factorize_convs = factorize_convs
        self.factorize_linears = factorize_linears
        self.min_channels = min_channels
        self.latent_channels = latent_channels
        self.min_features = min_features
        self.latent_features = latent_features
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        modules = state.unwrapped_model.modules()
        users = Counter(weight for module in modules for weight in module.parameters(recurse=False))

        def factorize_unshared(layer: nn.Module, index: int) -> nn.Module | None:
            return None if users[layer.weight] > 1 else self._factorize(layer)  # type: ignore[arg-type, index]

        kinds = {nn.Conv2d: self.factorize_convs, nn.Linear: self.factorize_linears}
        policies = {kind: factorize_unshared for kind, is_chosen in kinds.items() if is_chosen}
        operate(self, state, policies, "layer that is large enough and would get smaller", self.allow_no_match)

    def _factorize(self, layer: nn.Conv2d | nn.Linear) -> nn.Module | None:
        if isinstance(layer, nn.Conv2d):
            narrow = min(layer.in_channels, layer.out_channels)
            minimum = self.min_channels
            rank = resolve_width("latent_channels", self.latent_channels, narrow)
        else:
            narrow = min(layer.in_features, layer.out_features)
            minimum = self.min_features
            rank = resolve_width("latent_features", self.latent_features, narrow)
        rows, columns = layer.weight.flatten(1).shape
        if narrow < minimum or rank * (rows + columns) >= rows * columns:
            return None
        if isinstance(layer, nn.Conv2d):
            return factorize_conv(layer, rank) if layer.groups == 1 else None
        return factorize_linear(layer, rank)
