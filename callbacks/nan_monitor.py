"""Ends runs whose loss is NaN or infinite."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from runner import Callback
from runner.failures.errors import divergence

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runner import Logger, State

SLOTS = 64  # number of losses that may be in transfer to the host at one time


class NaNMonitor(Callback):
    """Ends the run as diverged when the training loss of a batch is NaN or infinite.

    Each rank checks its own loss, so that the error names the rank on which it began. On a CPU the check is immediate,
    before a checkpoint is written. A GPU copies each loss to the host in the background, and it is checked on arrival,
    usually one batch later. At the end of an epoch and of training the monitor waits for the last losses.

    Raises:
        FloatingPointError: in training, a loss is not finite; the message names the epoch, the batch and the rank.
    """

    def __init__(self) -> None:
        self._slots: list[Tensor] = []
        self._values: list[Any] = []  # the same memory, read without a tensor operation
        self._sent: deque[_Sent] = deque()
        self._on_gpu = False

    def fit_start(self, state: State, logger: Logger) -> None:
        import torch

        self._on_gpu = state.device.type == "cuda"
        losses = torch.zeros(SLOTS, pin_memory=self._on_gpu)
        self._slots = list(losses.unbind())
        self._values = [slot.numpy() for slot in self._slots]
        self._sent.clear()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._on_gpu:
            self._send(state)
            self._check_losses()
            return
        self._slots[0].copy_(state.total_loss)
        if not math.isfinite(self._values[0]):
            self._fail(self._values[0], state.timestamp.epoch, state.timestamp.batch)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._check_losses(wait=True)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._check_losses(wait=True)

    def _send(self, state: State) -> None:
        """Start copying the loss from the GPU to the host."""
        if len(self._sent) == SLOTS:
            self._check_losses(wait=True)
        now = state.timestamp
        self._slots[now.batch % SLOTS].copy_(state.total_loss, non_blocking=True)
        self._sent.append(_Sent(now.epoch, now.batch, _record_event(state.device)))

    def _check_losses(self, wait: bool = False) -> None:
        """Check the losses that have arrived or, with `wait`, all of them: the intended host-device sync."""
        while self._sent:
            epoch, batch, arrival = self._sent[0]
            if not arrival.query():
                if not wait:
                    return
                arrival.synchronize()
            self._sent.popleft()
            loss = self._values[batch % SLOTS]
            if not math.isfinite(loss):
                self._fail(loss, epoch, batch)

    def _fail(self, loss: Any, epoch: int, batch: int) -> NoReturn:
        from runner import get_global_rank

        raise divergence(
            f"the loss is {loss} on rank {get_global_rank()}, epoch {epoch + 1}, batch {batch} (both from 1). "
            "Lower the learning rate, warm it up, or clip gradients (+algorithms=gradient_clipping), or look for nan "
            "in the data"
        )


class _Sent(NamedTuple):
    epoch: int
    batch: int
    arrival: torch.cuda.Event
    """Completed by the GPU when the loss is on the host."""


def _record_event(device: torch.device) -> torch.cuda.Event:
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
