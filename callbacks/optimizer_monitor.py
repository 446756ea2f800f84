"""Logs norms of gradients, weights, updates and momenta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from runner import Callback
from runner.callbacks._thinning import next_measurement
from runner.failures.checks import check_whole

if TYPE_CHECKING:
    from torch import Tensor, nn

    from runner import Logger, State

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
"""Names that torch's optimizers give to their mean of past gradients."""


class OptimizerMonitor(Callback):
    """Logs the norms of each parameter's gradient, weights, last update and momentum at an interval.

    Gradients are those that the optimizer used: averaged over all ranks, unscaled and clipped. Norms are computed on
    the device for all parameters at once, and read back in the background; other batches cost nothing. All ranks
    compute them, so that the norm of a sharded tensor is that of the whole, and rank 0 logs. Parameters without a
    gradient are left out.

    Args:
        log_optimizer_metrics: whether to log momenta, weights and updates too, for optimizers that keep momenta. An
            update is measured, not derived from a formula, which takes a copy of the weights during a measured batch.
        batch_log_interval: batches between two measurements, at least 1; None means every 10 batches up to batch 1000,
            and every 100 after that.

    Raises:
        ValueError: `batch_log_interval` is below 1.

    Logs:
        l2_norm/grad/{parameter}: norm of the gradient of a parameter; no unit.
        l2_norm/grad/global: norm of all gradients together; no unit.
        l2_norm/moment/{parameter}: norm of the mean of past gradients after the step; no unit.
        l2_norm/param/{parameter}: norm of the weights after the step; no unit.
        l2_norm/update/{parameter}: norm of the change of the weights in the step, including weight decay; no unit.
    """

    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: int | None = None) -> None:
        check_whole("batch_log_interval", batch_log_interval, 1, "a number of batches", none="10, and 100 later on")
        self.log_optimizer_metrics = log_optimizer_metrics
        self.batch_log_interval = batch_log_interval
        self._due = 0  # the next batch to measure, counted from 1
        self._named: list[tuple[str, nn.Parameter]] = []
        self._parameters: dict[str, nn.Parameter] = {}  # those with a gradient
        self._changes: tuple[Tensor, ...] = ()
        self._metrics: dict[str, Any] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        self._named = [*state.unwrapped_model.named_parameters()]
        self._due = self._next_due(state.timestamp.batch)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch + 1 >= self._due:
            self._due = self._next_due(self._due)
            self._measure(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._changes:
            self._add_optimizer_metrics(state)
            self._changes = ()
        if self._metrics:
            logger.log_uncopied(self._metrics)
            self._metrics = {}

    def _measure(self, state: State) -> None:
        import torch

        self._parameters = {name: parameter for name, parameter in self._named if parameter.grad is not None}
        if not self._parameters:
            return
        norms = l2_norms([parameter.grad for parameter in self._parameters.values()])
        self._metrics = {f"l2_norm/grad/{name}": norm for name, norm in zip(self._parameters, norms, strict=True)}
        self._metrics["l2_norm/grad/global"] = torch.linalg.vector_norm(torch.stack([*norms]))
        is_first = state.timestamp.batch == 0  # the first step creates the momenta
        if self.log_optimizer_metrics and (is_first or any(moment is not None for moment in self._moments(state))):
            weights: list[Tensor] = [*self._parameters.values()]
            with torch.no_grad():
                # One fused operation makes a negated copy, to which another later adds the new weights.
                self._changes = torch._foreach_neg(weights)  # pyright: ignore[reportPrivateImportUsage]

    def _next_due(self, batch: int) -> int:
        interval = self.batch_log_interval
        return next_measurement(10, batch) if interval is None else (batch // interval + 1) * interval

    def _add_optimizer_metrics(self, state: State) -> None:
        import torch

        weights: list[Tensor] = [*self._parameters.values()]
        rows = [*zip(self._parameters, self._moments(state), weights, self._changes, strict=True)]
        rows = [row for row in rows if row[1] is not None]
        keys = [f"l2_norm/{kind}/{name}" for name, *_ in rows for kind in ("moment", "param", "update")]
        with torch.no_grad():
            torch._foreach_add_(self._changes, weights)  # pyright: ignore[reportPrivateImportUsage]
            norms = l2_norms([tensor for _, *tensors in rows for tensor in tensors])
        self._metrics |= zip(keys, norms, strict=True)

    def _moments(self, state: State) -> Iterator[Tensor | None]:
        optimizer_states = [optimizer.state for optimizer in state.optimizers]
        for parameter in self._parameters.values():
            yield _moment([states[parameter] for states in optimizer_states if parameter in states])


def _moment(states: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """Return the mean of past gradients in the states of optimizers for a parameter, if any."""
    for state in states:
        for key in FIRST_MOMENTS:
            if state.get(key) is not None:
                return state[key]
    return None


def l2_norms(tensors: Sequence[Any]) -> Sequence[Tensor]:
    """Return the Euclidean norm of each tensor, in 32 bits or more; for a sharded tensor that of the whole.

    Call it on all ranks if tensors are sharded.
    """
    import torch

    from runner.device.numbers import numbers_of
    from runner.distributed.sharding import any_sharded, whole

    if not tensors:
        return []
    tensors = [*map(numbers_of, tensors)]
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
    norms = torch._foreach_norm(list(tensors), 2, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    return [*map(whole, norms)] if any_sharded(norms) else norms
