"""Base classes of weight averages, which evaluate the average with batch norm statistics of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from runner import Algorithm, Interval, Logger, State, Time, TimeUnit, get_global_rank, get_world_size
from runner.core.randomness import ForwardStream
from runner.device.batch import to_device
from runner.distributed.sharding import any_sharded, is_sharded, like, local
from runner.failures.checks import check_whole
from runner.models.model import in_eval_mode
from runner.models.training_mode import BATCH_NORMS
from runner.optim.scheduled_rates import ScheduledRates
from runner.timing.time import convert

log = logging.getLogger("runner")


def wide_copy(tensor: Tensor) -> Tensor:
    """Return a copy with at least 32 bits per element, so that many small changes can add up in an average."""
    wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wide, copy=True)


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's parts of sharded tensors; other tensors unchanged."""
    return [*(map(local, tensors) if any_sharded(tensors) else tensors)]


@torch.no_grad()
def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors in place, in one fused operation; each rank copies its part of sharded tensors."""
    if into:
        torch._foreach_copy_(_parts(into), _parts(values))  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def move_towards(averages: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """Set each average a to a + weight (v - a), in place, in one fused operation.

    With weight = 1 - s this is the exponential average s a + (1 - s) v. With weight = 1 / n for the n-th value, it is
    the plain mean, because n mean_n = (n - 1) mean_(n-1) + v_n. Each rank moves its part of sharded tensors.

    Args:
        averages: floating-point tensors, changed in place.
        values: tensors of the same shapes, in the averages' precision or a lower one.
        weight: weight of the values, in [0, 1].
    """
    averages = _parts(averages)
    pairs = zip(averages, _parts(values), strict=True)
    values = [value if value.dtype == average.dtype else value.to(average.dtype) for average, value in pairs]
    torch._foreach_lerp_(averages, values, weight)  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def swapped_in(live: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Set a model's tensors to other values within the context; restore them afterwards, even after an exception."""
    trained = [tensor.detach().clone() for tensor in live]
    try:
        copy_all(live, values)
        yield
    finally:
        copy_all(live, trained)


def count_updates(state: State, interval: Time, start: Time, end: Time) -> float:
    """Return the number of positive multiples of an interval from `start` to `end`, both included.

    It is infinite if the units cannot be converted with max_duration and the length of an epoch.
    """

    def in_intervals(time: Time) -> Fraction:
        return convert(time, interval.unit, state.max_duration, state.train_dataloader_len) / interval.exact

    try:
        return max(0, math.floor(in_intervals(end)) - max(1, math.ceil(in_intervals(start))) + 1)
    except ValueError:
        return math.inf


class TimedAverage(Algorithm):
    """Base class of averages that are updated at an interval; warns once, on rank 0, if there will be no update.

    If the time units can be converted into each other, the warning comes when training starts, otherwise when it has
    ended. It is not an error, because training may continue with another `fit` or a longer max_duration.
    """

    start: Time
    end = Time(1, TimeUnit.DURATION)
    update_interval: Interval
    _average: dict[str, Tensor]
    _warned = False

    def fit_start(self, state: State, logger: Logger) -> None:
        super().fit_start(state, logger)
        if not self._count_until(state.max_duration, state):
            self._warn(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        if not state.stop_requested:
            self._warn(state)

    def _is_updated(self) -> bool:
        return bool(self._average)

    def _count_until(self, end: Time, state: State) -> float:
        return count_updates(state, self.update_interval.time, self.start, end)

    def _warn(self, state: State) -> None:
        if not self._is_updated() and not self._warned and get_global_rank() == 0:
            log.warning("%s averages nothing, %s", self.config_key, self._without_update(state))
        self._warned = True

    def _without_update(self, state: State) -> str:
        """Return the message for a run in which the average is never updated."""
        return (
            f"update_interval={str(self.update_interval.time)!r}: no update falls between start={str(self.start)!r} "
            f"and end={str(self.end)!r} of max_duration={str(state.max_duration)!r}; update earlier or more often"
        )


class WeightAverage(Algorithm):
    """Base class of averages of the trained parameters, for evaluations, exports and a checkpoint's `model.pt`.

    Training continues with its own weights. A subclass keeps the average in `_average`, by parameter name, and calls
    `_changed` after each change. The running statistics of batch norm are not averaged, because they describe the
    activations of the trained weights, and the averaged weights have other activations (Izmailov et al. 2018). Instead,
    they are estimated from the first training batches, in the loader's order, once for each timestamp at which the
    average is evaluated or saved. Each rank reads its own share of the batches; evaluations use rank 0's statistics.
    All other buffers come from training.

    Args:
        bn_batches: number of training batches to estimate the statistics from; 0 keeps the statistics of training.
    """

    def __init__(self, bn_batches: int) -> None:
        check_whole("bn_batches", bn_batches, 0)
        self.bn_batches = bn_batches
        self._parameters: dict[str, nn.Parameter] = {}
        self._average: dict[str, Tensor] = {}
        self._norms: list[Any] = []
        self._statistics: list[Tensor] = []
        self._estimated_at: tuple[int | float, ...] = ()  # iteration, epoch, batch
        self._swapped = False

    def after_load(self, state: State, logger: Logger) -> None:
        model = state.unwrapped_model
        self._parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        if self._average:
            parameters = dict(model.named_parameters())
            if differing := sorted(self._average.keys() - parameters.keys()):
                raise ValueError(f"the saved average belongs to another model, which has {differing}")
            self._parameters = {name: parameters[name] for name in self._average}
            self._average = self._placed(self._average)
        norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
        self._norms = [norm for norm in norms if norm.running_mean is not None] if self.bn_batches else []

    def fit_start(self, state: State, logger: Logger) -> None:
        loader = state.train_dataloader
        argument = f"bn_batches={self.bn_batches!r}"
        remedy = "set bn_batches=0 to keep the running statistics of training"
        is_read_once = hasattr(loader, "__next__") or getattr(loader, "persistent_workers", False)
        if self._norms and is_read_once and not hasattr(loader, "first"):
            raise ValueError(
                f"{argument}: batch norm statistics need extra training batches, but the train dataloader can be read "
                f"only once; {remedy}"
            )
        if get_world_size() > 1 and any(isinstance(norm, nn.SyncBatchNorm) for norm in self._norms):
            raise ValueError(f"{argument}: SyncBatchNorm would wait for other ranks when rank 0 saves; {remedy}")
        if self._norms and is_sharded(state.unwrapped_model) and getattr(loader, "ranks_read", None) == "shares":
            raise ValueError(
                f"{argument}: ranks of a sharded model run in lockstep, but may have different numbers of batches; "
                f"{remedy}"
            )

    def epoch_start(self, state: State, logger: Logger) -> None:
        for name, parameter in state.unwrapped_model.named_parameters():
            if parameter.requires_grad and name not in self._parameters:  # it was unfrozen
                self._parameters[name] = parameter
                if self._average:
                    self._add(name, parameter)
                    self._changed()

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        """Add a parameter that was frozen until now to the average."""
        self._average[name] = wide_copy(parameter)

    @contextmanager
    def evaluation_weights(self, state: State) -> Iterator[None]:
        if not self._average or self._swapped:
            yield
            return
        weights = [*self._parameters.values()]
        averages = [self._average[name] for name in self._parameters]
        running = [buffer for norm in self._norms for buffer in norm.buffers()]
        now = state.timestamp[:3]
        if now != self._estimated_at:  # what a model computes may depend on time, as with StochasticDepth
            self._statistics = []
            self._estimated_at = now
        self._swapped = True
        try:
            with swapped_in([*weights, *running], [*averages, *(self._statistics or running)]):
                if running and not self._statistics and state.train_dataloader is not None:
                    estimate_statistics(state, self._norms, self.bn_batches)
                    self._statistics = [buffer.clone() for buffer in running]
                yield
        finally:
            self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average = dict(state["average"])
        self._changed()

    def _changed(self) -> None:
        self._statistics = []

    def _placed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by name, each on the device of the parameter with that name, and sharded like it."""
        return {name: like(tensors[name], weight) for name, weight in self._parameters.items()}


@torch.no_grad()
def estimate_statistics(state: State, norms: Sequence[Any], num_batches: int) -> None:
    """Set the running statistics of batch norm layers to their mean over the first training batches of this rank.

    All batches count equally: the running mean becomes the mean of the batches' means, and the running variance the
    mean of their unbiased variances. A batch that would make the statistics NaN or infinite is skipped. At most
    `num_batches` are used; an epoch may have fewer.
    """
    model = state.unwrapped_model
    loader = state.train_dataloader
    momenta = [norm.momentum for norm in norms]
    stream = ForwardStream(state.rank_zero_seed, state.device, "batch_norm")
    devices = [state.device] if state.device.type == "cuda" else []
    try:
        with in_eval_mode(model), torch.random.fork_rng(devices):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean over batches; torch reads their number back, a host-device sync
                norm.training = True
            stream.start(0, 0)
            batches = loader.first(num_batches) if hasattr(loader, "first") else iter(loader)  # type: ignore
            for batch in islice(batches, num_batches):
                before = [buffer.clone() for norm in norms for buffer in norm.buffers()]
                batch = state.precision.cast(to_device(batch, state.device))
                state.precision.autocast(state.device)(model)(batch)
                running = [buffer for norm in norms for buffer in norm.buffers()]
                # An intended host-device sync per batch, for the few batches of an evaluation.
                if not torch.stack([buffer.isfinite().all() for buffer in running]).all():
                    copy_all(running, before)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def keep_base_rates(state: State, name: str) -> None:
    """Store each group's learning rate, so that `set_rates` never starts from its own. Call it at BEFORE_LOAD."""
    if not all(isinstance(scheduler, ScheduledRates) for scheduler in state.schedulers):
        raise ValueError(
            f"{name}: torch's own schedulers would overwrite the learning rate; use those of runner.optim.schedulers"
        )
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))


def set_rates(state: State, function: Callable[[Any], Any]) -> None:
    """Set the learning rates of the next batch to `function(scheduled rate)`. Call it at BEFORE_TRAIN_BATCH."""
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            rate = function(group["lr"] if state.schedulers else group["initial_lr"])
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
