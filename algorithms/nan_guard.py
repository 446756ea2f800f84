"""NaNGuard: a batch whose loss or gradient is not finite does not reach the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from runner import Algorithm, Interval, Logger, State, Time, get_global_rank, get_world_size
from runner.algorithms._snapshot import KeptBuffers, roll_back, take_snapshot
from runner.checks import check_whole

POLICIES = ("raise", "skip", "rollback")

log = logging.getLogger("runner")


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether no element is NaN or infinite, as a zero-dimensional bool.

    Looks at the largest magnitude, which unlike a sum cannot overflow: finite tensors are never taken for others.

    Args:
        tensors: of any shapes and floating-point types; the first one's device is the result's.
    """
    return torch.isfinite(get_total_norm([tensor for tensor in tensors if tensor.numel()], math.inf))


class NaNGuard(Algorithm):
    """Ends the run at a batch whose loss or gradient is NaN or infinite, leaves it out, or goes back from it.

    Decides once per batch, when gradients are final and before any optimizer steps, for all ranks alike: a loss that is
    not finite on one rank counts on all. Whatever the policy, the weights and the optimizers' state do not see the
    batch, buffers (running statistics, say) are again what they were before it, and the logged loss stays what it was.
    Time, data, schedules and other algorithms go on: an average keeps the weights that a rollback drops. Optimizers
    must leave alone what has no gradient, as all of torch's do.

    With amp_fp16, infinite gradients of a finite loss are left to the loss scaler as long as its scale is above 1.

    Each batch waits for the device once: the host cannot prepare the next one in the meantime, which a GPU feels where
    batches are small. With many ranks it adds an all-reduce of two bytes. The callback NaNMonitor waits for nothing,
    but looks at the loss only and after the optimizers have stepped; it ends the run, so give it beside 'raise' only.

    Args:
        policy: 'raise': end the run. 'skip': leave the batch out. 'rollback': put weights, optimizer state and buffers
            back to the last snapshot, and go on with the next batch; before there is one, leave the batch out.
        snapshot_interval: time between snapshots for 'rollback': a time string, or epochs as an int. One is taken once
            the next batch's loss and gradients are finite, lies on the model's device, takes as much memory there as
            weights and optimizer state, and is part of every checkpoint.
        max_consecutive: batches in a row that 'skip' and 'rollback' put up with; one more ends the run. At least 1.

    Logs:
        nan_guard/skipped: batches so far that were left out or gone back from; at each of them, beside a warning.

    Raises:
        ValueError: an argument is out of range.
        FloatingPointError: in training, see `policy` and `max_consecutive`; loss, rank, epoch, batch and the first
            parameter whose gradient is not finite are named.

    Evidence:
        Some: large language models were trained past loss spikes by going back and leaving out the data (Chowdhery et
        al. 2022, arXiv:2204.02311). A cause that stays, such as too high a learning rate, is not cured.
    """

    # AFTER_TRAIN_BATCH goes in reverse: the guard looks at gradients before they are clipped.
    runs_after = ("GradientClipping",)

    def __init__(
        self, policy: str = "skip", snapshot_interval: str | int | Time = "100ba", max_consecutive: int = 10
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: must be one of {', '.join(map(repr, POLICIES))}")
        check_whole("max_consecutive", max_consecutive, 1)
        self.policy = policy
        self.snapshot_interval = Interval(snapshot_interval, "snapshot_interval")
        if not self.snapshot_interval.time.value:
            raise ValueError(f"snapshot_interval={snapshot_interval!r}: must be above 0; without snapshots: 'skip'")
        self.max_consecutive = max_consecutive
        self._skipped = self._in_a_row = 0
        self._snapshot: dict[str, Any] = {}
        self._due = True  # whether the next sound batch takes a snapshot

    def fit_start(self, state: State, logger: Logger) -> None:
        self._parameters = dict(state.unwrapped_model.named_parameters())
        self._buffers = KeptBuffers(state.unwrapped_model)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self._buffers.keep()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # What stands in for an empty share of a batch weighs nothing.
        loss = torch.zeros_like(state.total_loss) if state.batch_is_padding else state.total_loss
        gradients = [_gradient(one) for one in self._parameters.values() if one.grad is not None]
        finite = torch.stack([torch.isfinite(loss), all_finite([loss, *gradients])]).to(torch.uint8)
        if get_world_size() > 1:
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        loss_is_finite, all_are_finite = finite.tolist()  # the intended host-device sync
        if all_are_finite or (loss_is_finite and state.scaler is not None and state.scaler.get_scale() > 1):
            self._in_a_row = 0
            if self.policy == "rollback" and self._due:
                self._snapshot, self._due = take_snapshot(state, self._buffers.values()), False
            return
        found = self._describe(state, loss)
        self._buffers.put_back()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._leave_out(state, logger, found)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._due = self._due or state.is_due(self.snapshot_interval)

    epoch_end = iteration_end = batch_end

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self._skipped, "in_a_row": self._in_a_row, "snapshot": self._snapshot, "due": self._due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped, self._in_a_row = state["skipped"], state["in_a_row"]
        self._snapshot, self._due = state["snapshot"], state.get("due", True)

    def _leave_out(self, state: State, logger: Logger, found: str) -> None:
        """Do what the policy says with a batch that the optimizers cannot see any more."""
        if self.policy == "raise":
            raise FloatingPointError(f"{found}. Lower the learning rate, warm it up, or clip gradients")
        self._skipped += 1
        self._in_a_row += 1
        if self._in_a_row > self.max_consecutive:
            raise FloatingPointError(f"{found}: more than max_consecutive={self.max_consecutive} such batches in a row")
        done = "left out"
        if self.policy == "rollback" and self._snapshot:
            roll_back(state, self._snapshot)
            done = f"went back to the weights after batch {self._snapshot['batch']}"
        if get_global_rank() == 0:
            log.warning("%s: %s", found, done)
        logger.log_metrics({"nan_guard/skipped": self._skipped}, step=state.timestamp.batch + 1)

    def _describe(self, state: State, loss: Tensor) -> str:
        """Return where a number is not finite. All ranks."""
        losses = [loss.clone() for _ in range(get_world_size())]
        if get_world_size() > 1:
            dist.all_gather(losses, loss)
        rank = next((rank for rank, one in enumerate(losses) if not one.isfinite()), 0)
        gradients = ((name, _gradient(one)) for name, one in self._parameters.items() if one.grad is not None)
        spoilt = next((f"the gradient of {name!r} is not" for name, one in gradients if not all_finite([one])), None)
        now = state.timestamp
        return (
            f"the loss is {losses[rank]:g} on rank {rank}, {spoilt or 'all gradients are'} finite, "
            f"epoch {now.epoch + 1}, batch {now.batch + 1} (both from 1)"
        )


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
