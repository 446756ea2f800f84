"""Norms of gradients, and of what an optimizer makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from runner import Callback

if TYPE_CHECKING:
    from torch import Tensor, nn

    from runner import Logger, State

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
"""What torch's optimizers call their mean of past gradients."""


class OptimizerMonitor(Callback):
    """Logs the norm of each parameter's gradient at an interval, and of its weights, last change and momentum.

    Gradients are as the optimizer used them: averaged over all ranks, unscaled, clipped. A norm is computed on the
    device for all parameters at once, and read back in the background; other batches cost nothing. All ranks compute,
    so that sharded tensors give the norm of the whole; rank 0 logs. Parameters without a gradient are left out.

    Args:
        log_optimizer_metrics: also log momenta, weights and changes, with optimizers that keep momenta. The change is
            measured, not derived from a formula, which takes a copy of the weights while such a batch is trained.
        batch_log_interval: batches from one time to the next, at least 1.

    Raises:
        ValueError: an argument is out of range.

    Logs:
        l2_norm/grad/{parameter}: of its gradient.
        l2_norm/grad/global: of all gradients together, the root of the sum of squares.
        l2_norm/moment/{parameter}: of the mean of past gradients after the step.
        l2_norm/param/{parameter}: of the weights after the step.
        l2_norm/update/{parameter}: of what the step added to them, weight decay included.
    """

    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: int = 10) -> None:
        if isinstance(batch_log_interval, bool) or not isinstance(batch_log_interval, int) or batch_log_interval < 1:
            raise ValueError(f"batch_log_interval={batch_log_interval!r}: must be a number of batches, at least 1")
        self.log_optimizer_metrics = log_optimizer_metrics
        self.batch_log_interval = batch_log_interval
        self._parameters: dict[str, nn.Parameter] = {}
        self._changes: tuple[Tensor, ...] = ()
        self._metrics: dict[str, Any] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if (state.timestamp.batch + 1) % self.batch_log_interval:
            return
        import torch

        named = state.unwrapped_model.named_parameters()
        self._parameters = {name: parameter for name, parameter in named if parameter.grad is not None}
        if not self._parameters:
            return
        self._metrics = _norms("grad", {name: _gradient(one) for name, one in self._parameters.items()})
        self._metrics["l2_norm/grad/global"] = torch.linalg.vector_norm(torch.stack([*self._metrics.values()]))
        if self.log_optimizer_metrics:
            # Negated, so that one fused operation copies them, and another makes the change of it.
            self._changes = torch._foreach_neg(self._weights())  # pyright: ignore[reportPrivateImportUsage]

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._metrics:
            return
        if self.log_optimizer_metrics:
            import torch

            weights = self._weights()
            torch._foreach_add_(self._changes, weights)  # pyright: ignore[reportPrivateImportUsage]
            moments = self._moments(state)
            for kind, tensors in (("param", weights), ("update", self._changes)):
                named = zip(self._parameters, tensors, strict=True)
                self._metrics |= _norms(kind, {name: tensor for name, tensor in named if name in moments})
            self._metrics |= _norms("moment", moments)
        logger.hand_over(self._metrics)
        self._metrics, self._changes = {}, ()

    def _weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters.values()]

    def _moments(self, state: State) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self._parameters.items():
            kept = (optimizer.state.get(parameter, {}) for optimizer in state.optimizers)
            moments = (one[key] for one in kept for key in FIRST_MOMENTS if one.get(key) is not None)
            if (moment := next(moments, None)) is not None:
                found[name] = moment
        return found


def _norms(kind: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {f"l2_norm/{kind}/{name}": norm for name, norm in zip(tensors, l2_norms([*tensors.values()]), strict=True)}


def l2_norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the root of the sum of squares of each tensor, in 32 bits or more; of a sharded one the whole's.

    All ranks where tensors are sharded.
    """
    import torch

    if not tensors:
        return []
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    norms = torch._foreach_norm(list(tensors), 2, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    # A DTensor is known by what it can do: importing its class takes a second.
    sharded: list[Any] = [norm for norm in norms if hasattr(norm, "full_tensor")]
    return [norm.full_tensor() for norm in sharded] or norms


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
