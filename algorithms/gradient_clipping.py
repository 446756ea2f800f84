"""Gradient clipping: by the norm of all gradients, by value, or per output unit in proportion to its weights."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.device.numbers import make_plain, numbers_of
from runner.distributed.sharding import added_up
from runner.failures.checks import check_number, check_one_of

TYPES = ("norm", "value", "adaptive")


def unit_norms(tensor: Tensor) -> Tensor:
    """Return the 2-norm of each output unit, over all dimensions but the first; for a vector or scalar, its own norm.

    Args:
        tensor: weights or gradients, (), (N,) or (N, ...).

    Returns:
        Norms that broadcast with `tensor`: (N, 1, ...) for two or more dimensions, otherwise zero-dimensional.
    """
    if tensor.ndim <= 1:
        return added_up(torch.linalg.vector_norm(tensor))
    return added_up(torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True))


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], threshold: float, epsilon: float = 1e-3) -> None:
    """Scale the gradient g of weights w to g min(1, t max(norm(w), epsilon) / norm(g)), per output unit, in place.

    A step of gradient descent with the rate r changes the weights of a unit by the fraction r norm(g) / norm(w), which
    is then at most r t, for small and large weights alike (Brock et al. 2021).

    Args:
        parameters: parameters to clip; those without a gradient are skipped.
        threshold: largest ratio t of the norms of gradient and weights, above 0.
        epsilon: lower bound of norm(w), so that units that start at zero can learn.
    """
    pairs = [_rows(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not pairs:
        return
    factors = [unit_norms(parameter) for parameter, _ in pairs]
    norms = [unit_norms(gradient) for _, gradient in pairs]
    torch._foreach_clamp_min_(factors, epsilon)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_mul_(factors, threshold)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_clamp_min_(norms, 1e-6)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_div_(factors, norms)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_clamp_max_(factors, 1.0)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_mul_([gradient for _, gradient in pairs], factors)  # pyright: ignore[reportPrivateImportUsage]


def _rows(weights: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and gradient; for a sparse gradient, which must be coalesced, only the rows that it holds."""
    if not gradient.is_sparse:
        return weights, gradient
    return weights[tuple(gradient.indices())], gradient.values()


class GradientClipping(Algorithm):
    """Clips the gradients of the parameters that the optimizers train, once per batch, after unscaling and all-reduce.

    By norm, all gradients g are scaled by min(1, t / (norm(g) + 1e-6)) with the threshold t: g gets shorter, but keeps
    its direction (Pascanu et al. 2013). Clipping by value bounds each element separately, which may change the
    direction. Adaptive clipping bounds the relative change of each unit's weights, see `clip_adaptively`.

    Nothing is read back from the device. A norm that is not finite makes all gradients non-finite, and the loss scaler
    of amp_fp16 then skips the step.

    Args:
        clipping_type: 'norm' clips the 2-norm of all gradients together, including sharded ones; 'value' each element,
            to [-threshold, threshold], for complex elements the real and the imaginary part; 'adaptive' each output
            unit's norm relative to that of its weights.
        clipping_threshold: largest norm, largest absolute value, or (adaptive) largest ratio; above 0.

    Raises:
        ValueError: the type is unknown, or the threshold is not above 0.

    Evidence:
        Strong for language models: it removes loss spikes (Pascanu et al. 2013, arXiv:1211.5063). Adaptive: some,
        for networks without batch norm (Brock et al. 2021, arXiv:2102.06171).
    """

    def __init__(self, clipping_type: str = "norm", clipping_threshold: float = 1.0) -> None:
        check_one_of("clipping_type", clipping_type, TYPES)
        check_number("clipping_threshold", clipping_threshold, "(0, inf]")
        self.clipping_type = clipping_type
        self.clipping_threshold = clipping_threshold

    def after_train_batch(self, state: State, logger: Logger) -> None:
        groups = (group for optimizer in state.optimizers for group in optimizer.param_groups)
        parameters = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return  # NaNGuard has dropped the batch
        special = [parameter for parameter in parameters if parameter.grad.is_sparse or parameter.grad.is_complex()]
        for parameter in special:
            parameter.grad = make_plain(parameter.grad)
        plain: Any = parameters
        if special:  # torch's functions accept only plain tensors, and read only `grad`
            plain = [SimpleNamespace(grad=numbers_of(parameter.grad)) for parameter in parameters]
        if self.clipping_type == "norm":
            nn.utils.clip_grad_norm_(plain, self.clipping_threshold)
        elif self.clipping_type == "value":
            nn.utils.clip_grad_value_(plain, self.clipping_threshold)
        else:
            clip_adaptively(parameters, self.clipping_threshold)
