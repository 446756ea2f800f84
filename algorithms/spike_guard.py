"""SpikeGuard: after a spike in the loss or gradient, goes back to earlier weights and skips the samples."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from runner import Algorithm, Logger, State, get_global_rank, get_world_size
from runner.algorithms._snapshot import roll_back, take_snapshot
from runner.distributed.sharding import is_sharded, like
from runner.failures.checks import check_counts, check_number, check_whole
from runner.failures.errors import divergence, wrong_argument

COLUMNS = ("first_batch", "last_batch", "worst_batch", "loss", "gradient_norm", "deviations", "back_to_batch")
NORMAL = 1.4826  # standard deviations per median absolute deviation of a normal distribution
LEAST_SHARE = 0.05  # smallest deviation, as a fraction of the median, for values that hardly vary

log = logging.getLogger("runner")


def deviations(values: Tensor, history: Tensor) -> Tensor:
    """Return the number of robust standard deviations by which each batch is above the median of earlier batches.

    The standard deviation is estimated as 1.4826 times the median absolute deviation, because half of a normal
    distribution lies within 1 / 1.4826 = 0.6745 standard deviations of its median. Unlike the mean and the usual
    standard deviation, medians hardly move when the history contains a few outliers.

    Args:
        values: losses and gradient norms (2, n), float64.
        history: losses and gradient norms of earlier batches (2, m), all finite; m at least 1.

    Returns:
        The larger of the numbers for loss and gradient norm (n,); infinite if either is not finite.
    """
    median = history.median(dim=1, keepdim=True).values
    spread = NORMAL * (history - median).abs().median(dim=1, keepdim=True).values
    spread = spread.maximum(LEAST_SHARE * median.abs())
    excess = torch.where(spread > 0, (values - median) / spread, 0.0)  # 0 for a loss that is nearly always 0
    return excess.where(values.isfinite(), torch.inf).amax(dim=0)


class SpikeGuard(Algorithm):
    """Goes back to the last good weights after a spike in the loss or gradient, and skips the samples around it.

    Every `interval` batches are checked together. If none of them is a spike, weights, optimizer state, buffers and
    averages of weights are copied, on the device. Otherwise the last copy is restored, and training continues with the
    next batch: the samples of this interval are skipped, while time, schedules and other algorithms continue. A spike
    is a loss, or a norm of the gradient before clipping, that is more than `threshold` deviations above the median of
    the last `window` good batches, see `deviations`; a deviation is at least 5 % of the median. A value that is not
    finite is a spike, even in the first batch.

    The host waits for the device once per interval, and rank 0 sends its values to the other ranks, so that all make
    the same decision: the loss is that of rank 0's samples, the gradient that of all samples. Each copy takes as much
    memory as weights and optimizer state, and is part of every checkpoint. A lasting jump, such as after a change of
    batch size, looks like a spike too.

    Args:
        window: number of good batches to take the median of, at least 8; before that, only values that are not finite
            are spikes.
        interval: number of batches that are checked, and skipped, together; at least 1.
        threshold: number of deviations above the median that make a spike, above 0.
        limit: number of times that training goes back, at least 1; one more spike ends the run.

    Logs:
        spike_guard/rollbacks: how often training has gone back so far, logged each time along with a warning.
        spike_guard: a table of the spikes: the skipped batches, counted from 1, the worst of them with its loss and
            gradient norm, and the batch whose weights were restored; named after the config key.

    Raises:
        ValueError: an argument is out of range, or the model is sharded.
        FloatingPointError: during training, on all ranks, if there are more than `limit` spikes.

    Evidence:
        Some: large language models were trained past loss spikes by going back and skipping the data (Chowdhery et al.
        2022, arXiv:2204.02311). It does not cure a lasting cause, such as a learning rate that is too high.
    """

    # At BATCH_END it runs after these, so averages are up to date. AFTER_TRAIN_BATCH has the reverse order: there it
    # runs before them, so gradients are not clipped yet.
    runs_after = ("EMA", "SWA", "LAWA", "ScheduleFree", "GradientClipping")
    runs_before = ("NaNGuard",)  # a batch that it skips has no gradients, and is not a spike

    def __init__(self, window: int = 64, interval: int = 16, threshold: float = 12.0, limit: int = 5) -> None:
        check_whole("window", window, 8)
        check_counts(interval=interval, limit=limit)
        check_number("threshold", threshold, "(0, inf]")
        self.window = window
        self.interval = interval
        self.threshold = threshold
        self.limit = limit
        self._history = torch.empty(2, 0, dtype=torch.float64)
        self._recent = torch.zeros(2, interval, dtype=torch.float64)  # values of batches that are not checked yet
        self._count = 0
        self._good: dict[str, Any] = {}
        self._spikes: list[list[Any]] = []

    def before_load(self, state: State, logger: Logger) -> None:
        if is_sharded(state.unwrapped_model):
            reason = "the norm of its gradients would need communication after each batch"
            raise ValueError(f"SpikeGuard cannot be used with a sharded model: {reason}; leave it out")

    def fit_start(self, state: State, logger: Logger) -> None:
        wide = torch.float32 if state.device.type == "mps" else torch.float64
        self._recent = self._recent.to(state.device, wide)
        if not self._good:
            self._good = _copy(state)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if get_global_rank() == 0:  # values of other ranks are neither used nor saved
            parameters = state.unwrapped_model.parameters()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if gradients:
                norm = get_total_norm(gradients)
                if state.scaler is not None:  # the scaler skips a batch whose gradients overflow
                    norm = norm.where(norm.isfinite(), 0.0)
                self._recent[0, self._count] = state.total_loss
                self._recent[1, self._count] = norm
        self._count += 1

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._count == self.interval:
            self._check(state, logger)
            self._count = 0
            self._recent.zero_()
        self.epoch_end(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        # The final weights are checked, too, as soon as training is known to end. A callback may stop it at any event.
        is_over = state.stop_requested or state.timestamp >= state.max_duration
        has_gone_back = bool(self._spikes) and self._spikes[-1][1] == state.timestamp.batch
        if is_over and self._count and not has_gone_back:
            with state.changing(settles=state.is_consistent):
                self._check(state, logger, is_over=True)

    batch_checkpoint = epoch_checkpoint = iteration_end = iteration_checkpoint = fit_end = epoch_end

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self._history,
            "recent": self._recent,
            "count": self._count,
            "good": self._good,
            "spikes": self._spikes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["recent"].shape[1] != self.interval:
            raise wrong_argument(
                "interval", self.interval, f"the checkpoint has interval={state['recent'].shape[1]}; resume with that"
            )
        self._history = state["history"]
        self._recent = state["recent"] if get_global_rank() == 0 else torch.zeros_like(state["recent"])
        self._count = state["count"]
        self._good = state["good"]
        self._spikes = [[*row] for row in state["spikes"]]

    def _check(self, state: State, logger: Logger, is_over: bool = False) -> None:
        """Check the recent batches, and go back if one is a spike. All ranks."""
        recent = self._recent.clone()
        if get_world_size() > 1:
            dist.broadcast(recent, src=0)
        values = recent[:, : self._count].cpu().double()  # the intended host-device sync, once per interval
        if self._history.shape[1] < self.window:
            is_finite = values.isfinite().all(dim=0)
            excess = torch.zeros(self._count, dtype=torch.float64).masked_fill(~is_finite, torch.inf)
        else:
            excess = deviations(values, self._history)
        if bool((excess > self.threshold).any()):
            self._go_back(state, logger, values, excess)
        elif not is_over:  # so that a prolonged run checks the same batches as one that was longer from the start
            trained = values[:, values[1] > 0]  # a skipped batch has a norm of 0
            self._history = torch.cat([self._history, trained], dim=1)[:, -self.window :]
            self._good = _copy(state)

    def _go_back(self, state: State, logger: Logger, values: Tensor, excess: Tensor) -> None:
        last = state.timestamp.batch
        first = last - self._count + 1
        worst = int(excess.argmax())
        loss, norm = values[:, worst].tolist()
        message = f"batch {first + worst} (counted from 1) is a spike: loss {loss:.4g}, gradient norm {norm:.4g}"
        if excess[worst].isfinite():
            message += f", {excess[worst]:.1f} deviations above the median of the last {self.window} batches"
        if self._spikes and self._spikes[-1][0] == first:  # the end of an earlier fit cut this interval short
            self._spikes.pop()
        if len(self._spikes) == self.limit:
            raise divergence(
                f"{message}; training has gone back limit={self.limit} times already. Lower the learning rate, warm it "
                "up, or look at the samples of these batches"
            )
        _restore(state, self._good)
        back_to = self._good["batch"]
        self._spikes.append([first, last, first + worst, loss, norm, float(excess[worst]), back_to])
        if get_global_rank() == 0:
            log.warning(
                "%s: going back to the weights after batch %d, skipping batches %d to %d", message, back_to, first, last
            )
        logger.log_metrics({"spike_guard/rollbacks": len(self._spikes)})
        logger.log_table(COLUMNS, self._spikes, self.config_key)


def _averages(state: State) -> dict[str, Algorithm]:
    """Return the algorithms that keep an average of the weights, by config key."""
    default = Algorithm.evaluation_weights
    averages = [algorithm for algorithm in state.algorithms if type(algorithm).evaluation_weights is not default]
    return {average.config_key: average for average in averages}


def _copy(state: State) -> dict[str, Any]:
    """Return a copy of everything that depends on the samples trained so far."""
    buffers = {name: buffer.clone() for name, buffer in state.unwrapped_model.named_buffers()}
    averages = {key: copy.deepcopy(average.state_dict()) for key, average in _averages(state).items()}
    return {**take_snapshot(state, buffers), "averages": averages}


@torch.no_grad()
def _restore(state: State, good: dict[str, Any]) -> None:
    """Restore a copy made by `_copy`."""
    roll_back(state, good)
    for key, average in _averages(state).items():
        average.load_state_dict(_put_back(average.state_dict(), good["averages"].get(key, {})))


def _put_back(live: Any, kept: Any) -> Any:
    """Return the kept values, copied into the live tensors if they exist, because other objects may refer to those."""
    if isinstance(kept, Tensor):
        if not isinstance(live, Tensor) or live.shape != kept.shape:
            return kept.clone()
        return live.copy_(like(kept, live))
    if isinstance(kept, Mapping):
        mapping = live if isinstance(live, Mapping) else {}
        return {key: _put_back(mapping.get(key), value) for key, value in kept.items()}
    if isinstance(kept, list | tuple):
        items = [*live] if isinstance(live, list | tuple) else []
        return [_put_back(*pair) for pair in zip([*items, *[None] * len(kept)], kept, strict=False)]
    return kept
