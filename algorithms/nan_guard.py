"""NaNGuard: a batch whose loss or gradient is not finite never reaches the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from runner import Algorithm, Interval, Logger, State, Time, get_global_rank, get_world_size
from runner.algorithms._snapshot import KeptBuffers, roll_back, take_snapshot
from runner.device.numbers import numbers_of
from runner.distributed.sharding import local, whole
from runner.failures.checks import check_one_of, check_whole, refuse_if
from runner.failures.errors import divergence

POLICIES = ("raise", "skip", "rollback")

log = logging.getLogger("runner")


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether no element is NaN or infinite, as a zero-dimensional bool tensor.

    This checks the largest magnitude, which, unlike a sum, cannot overflow, so finite tensors always pass.

    Args:
        tensors: tensors of any shapes and floating-point types; the result is on the device of the first.
    """
    return torch.isfinite(get_total_norm([tensor for tensor in tensors if tensor.numel()], math.inf))


class NaNGuard(Algorithm):
    """Ends the run at a batch whose loss or gradient is not finite, skips that batch, or rolls back to earlier weights.

    The decision is made once per batch, when gradients are final and before any optimizer steps, and is the same on all
    ranks: a loss that is not finite on one rank counts on all. Whatever the policy, the batch does not change the
    weights or the optimizers' state, buffers such as running statistics are restored to their values before it, and the
    logged loss stays unchanged. Time, data, schedules and other algorithms continue: an average keeps the weights that
    a rollback drops. Optimizers must ignore parameters without a gradient, as all of torch's do.

    With amp_fp16, infinite gradients of a finite loss are left to the loss scaler as long as its scale is above 1.

    The host waits for the device once per batch and cannot prepare the next batch in the meantime, which costs time on
    a GPU if batches are small. With several ranks, an all-reduce of two bytes is added. The callback NaNMonitor waits
    for nothing, but checks only the loss, and only after the optimizers have stepped; because it ends the run, use it
    only with 'raise'.

    Args:
        policy: what to do with such a batch: 'raise' ends the run; 'skip' drops the batch; 'rollback' restores weights,
            optimizer state and buffers from the last snapshot and continues with the next batch, or drops the batch if
            there is no snapshot yet.
        snapshot_interval: time between snapshots for 'rollback', a time string such as '100ba' or a number of epochs. A
            snapshot is taken once the next batch has a finite loss and finite gradients. It is kept on the model's
            device, takes as much memory as weights and optimizer state, and is part of every checkpoint.
        max_consecutive: number of such batches in a row that 'skip' and 'rollback' accept, at least 1; one more ends
            the run.

    Logs:
        nan_guard/skipped: number of batches skipped or rolled back so far, logged at each of them along with a warning.

    Raises:
        ValueError: an argument is out of range.
        FloatingPointError: during training, a loss or gradient is not finite, and `policy` or `max_consecutive` ends
            the run; the message has the loss, rank, epoch, batch and the first parameter with such a gradient.

    Evidence:
        Some: large language models were trained past loss spikes by rolling back and skipping the data (Chowdhery et
        al. 2022, arXiv:2204.02311). A lasting cause, such as too high a learning rate, remains.
    """

    # AFTER_TRAIN_BATCH runs in reverse order, so that the guard sees gradients before they are clipped.
    runs_after = ("GradientClipping",)

    def __init__(
        self, policy: str = "skip", snapshot_interval: str | int | Time = "100ba", max_consecutive: int = 10
    ) -> None:
        check_one_of("policy", policy, POLICIES)
        check_whole("max_consecutive", max_consecutive, 1)
        self.policy = policy
        self.snapshot_interval = Interval(snapshot_interval, "snapshot_interval")
        reason = "must be above 0; for no snapshots, use policy='skip'"
        refuse_if(not self.snapshot_interval.time.value, "snapshot_interval", snapshot_interval, reason)
        self.max_consecutive = max_consecutive
        self._skipped = 0
        self._in_a_row = 0
        self._snapshot: dict[str, Any] = {}
        self._is_due = True  # whether the next finite batch takes a snapshot

    def fit_start(self, state: State, logger: Logger) -> None:
        self._parameters = dict(state.unwrapped_model.named_parameters())
        self._buffers = KeptBuffers(state.unwrapped_model)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self._buffers.keep()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # A batch that stands in for this rank's empty share has no weight.
        loss = torch.zeros_like(state.total_loss) if state.batch_is_padding else state.total_loss
        parameters = [parameter for parameter in self._parameters.values() if parameter.grad is not None]
        gradients = [numbers_of(local(parameter.grad)) for parameter in parameters]
        finite = torch.stack([torch.isfinite(loss), all_finite([loss, *gradients])]).to(torch.uint8)
        if get_world_size() > 1:
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        loss_is_finite, all_are_finite = finite.tolist()  # the intended host-device sync
        if all_are_finite or (loss_is_finite and state.scaler is not None and state.scaler.get_scale() > 1):
            self._in_a_row = 0
            if self.policy == "rollback" and self._is_due:
                self._snapshot = take_snapshot(state, self._buffers.values())
                self._is_due = False
            return
        description = self._describe(state, loss)
        self._buffers.put_back()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._apply_policy(state, logger, description)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._is_due = self._is_due or state.is_due(self.snapshot_interval)

    epoch_end = iteration_end = batch_end

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self._skipped, "in_a_row": self._in_a_row, "snapshot": self._snapshot, "due": self._is_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = state["skipped"]
        self._in_a_row = state["in_a_row"]
        self._snapshot = state["snapshot"]
        self._is_due = state.get("due", True)

    def _apply_policy(self, state: State, logger: Logger, description: str) -> None:
        """Apply the policy to a batch whose gradients have been dropped."""
        if self.policy == "raise":
            raise divergence(f"{description}. Lower the learning rate, warm it up, or clip gradients")
        self._skipped += 1
        self._in_a_row += 1
        if self._in_a_row > self.max_consecutive:
            raise divergence(f"{description}: more than max_consecutive={self.max_consecutive} such batches in a row")
        action = "batch skipped"
        if self.policy == "rollback" and self._snapshot:
            roll_back(state, self._snapshot)
            action = f"rolled back to the weights after batch {self._snapshot['batch']}"
        if get_global_rank() == 0:
            log.warning("%s: %s", description, action)
        logger.log_metrics({"nan_guard/skipped": self._skipped}, step=state.timestamp.batch + 1)

    def _describe(self, state: State, loss: Tensor) -> str:
        """Return a message with the values that are not finite, their rank and parameter, and the batch. All ranks."""
        losses = [loss.clone() for _ in range(get_world_size())]
        if get_world_size() > 1:
            dist.all_gather(losses, loss)
        rank = next((rank for rank, value in enumerate(losses) if not value.isfinite()), 0)
        gradients = (
            (name, numbers_of(whole(parameter.grad)))
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        )
        culprits = (f"the gradient of {name!r} is not" for name, gradient in gradients if not all_finite([gradient]))
        timestamp = state.timestamp
        return (
            f"the loss is {losses[rank]:g} on rank {rank}, {next(culprits, 'all gradients are')} finite, "
            f"epoch {timestamp.epoch + 1}, batch {timestamp.batch + 1} (both from 1)"
        )
