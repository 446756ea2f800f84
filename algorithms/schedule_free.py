"""ScheduleFree: weight averaging instead of a learning-rate schedule, around any optimizer."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner import Logger, State, Time, get_global_rank
from runner.algorithms._averaging import WeightAverage, copy_all, keep_base_rates, move_towards, set_rates, wide_copy
from runner.distributed.sharding import local
from runner.failures.checks import check_number
from runner.optim.schedulers import constant

log = logging.getLogger("runner")


@torch.no_grad()
def interpolate(base: list[Tensor], average: list[Tensor], beta: float) -> list[Tensor]:
    """Return y = (1 - beta) z + beta x, the point at which gradients are taken; for sharded tensors, this rank's part.

    Args:
        base: iterates z of the optimizer.
        average: averages x, of the same shapes, in the same precision or a higher one.
        beta: weight of the average, in [0, 1).
    """
    average = [*map(local, average)]
    base = [local(z).to(x.dtype) for z, x in zip(base, average, strict=True)]
    return [*torch._foreach_lerp(base, average, beta)]  # pyright: ignore[reportPrivateImportUsage]


class _StepWeights(NamedTuple):
    """The sums behind x_n = (a_1 z_1 + ... + a_n z_n) / (a_1 + ... + a_n), the average of the iterates z.

    An iterate has the weight a = r^2, the square of the highest learning rate so far, so that the small steps of a
    warm-up count little. Step n therefore moves x by the fraction c = a_n / (a_1 + ... + a_n) towards z_n; with a
    constant rate c = 1 / n. Source: Defazio et al. 2024.
    """

    highest_rate: float = 0.0
    sum: float = 0.0

    def next(self, rate: float) -> tuple[_StepWeights, float]:
        """Return the values after a step, and the weight in [0, 1] of the step's iterate in the average.

        Args:
            rate: learning rate of the step.
        """
        highest = max(self.highest_rate, rate)
        total = self.sum + highest**2
        return _StepWeights(highest, total), highest**2 / total if total else 0.0


class ScheduleFree(WeightAverage):
    """Lets the optimizer step iterates z, takes gradients between z and their average x, and evaluates x.

    In each step z = optimizer(z, gradient at y), x = (1 - c) x + c z, and the model gets y = (1 - beta) z + beta x.
    With a constant rate c is 1 / number of steps, so that x is the plain mean of all z; steps of a warm-up count less.
    The average reduces the noise of the iterates, as a decaying rate would. With beta = 0, gradients are taken at z:
    that is Polyak-Ruppert averaging. A beta near 1 takes them near x, the weights that are evaluated. The average
    replaces a schedule, and beta replaces momentum: use a constant learning rate and an optimizer without momentum.
    `optimizer=schedule_free` sets both, with AdamW.

    Evaluations, exports and a checkpoint's `model.pt` see x, with batch norm statistics estimated for it, see
    `bn_batches`. Weight decay acts on z, and x has 32 bits or more. This takes the memory of two copies of the weights.
    All ranks keep the same iterates. A step that a loss scaler skips does not count.

    Args:
        beta: position between z (0) and x (1) at which gradients are taken, in [0, 1).
        warmup: time over which the learning rate rises linearly from 0, a time string in any unit such as '100ba'.
        bn_batches: number of training batches to estimate batch norm statistics from, whenever new weights are
            evaluated or saved; the first ones of this rank, before algorithms change them. 0 keeps the statistics of
            training.

    Raises:
        ValueError: an argument is out of range; or, when training starts, NaNGuard is set to roll back, which would
            restore y only, a warm-up is combined with torch's own schedulers, or the train dataloader cannot be read
            for `bn_batches`.

    Evidence:
        Strong: won the self-tuning track of the AlgoPerf competition of 2024 (Defazio et al. 2024, "The Road Less
        Scheduled", arXiv:2405.15682).
    """

    conflicts_with = ("EMA", "LAWA", "SWA")

    def __init__(self, beta: float = 0.9, warmup: str | Time = "0ba", bn_batches: int = 10) -> None:
        super().__init__(bn_batches)
        check_number("beta", beta, "[0, 1)")
        self.beta = beta
        self.warmup = Time.parse(warmup, "warmup")
        self._base: dict[str, Tensor] = {}
        self._weights: dict[str, _StepWeights] = {}
        self._names: dict[int, str] = {}
        self._hooks: list[Any] = []

    def before_load(self, state: State, logger: Logger) -> None:
        if self.warmup.value:
            keep_base_rates(state, f"warmup={str(self.warmup)!r}")
        for index, optimizer in enumerate(state.optimizers):
            self._hooks += [
                optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self._put_base(optimizer)),
                optimizer.register_step_post_hook(
                    lambda optimizer, args, kwargs, index=index: self._average_base(optimizer, index)
                ),
            ]

    def after_load(self, state: State, logger: Logger) -> None:
        super().after_load(state, logger)
        self._names = {id(weight): name for name, weight in self._parameters.items()}
        if self._base:
            self._base = self._placed(self._base)

    def fit_start(self, state: State, logger: Logger) -> None:
        super().fit_start(state, logger)
        if any(getattr(algorithm, "policy", None) == "rollback" for algorithm in state.algorithms):
            raise ValueError(
                "policy='rollback': NaNGuard cannot restore the iterates that ScheduleFree keeps beside the weights; "
                "use policy='skip'"
            )
        if get_global_rank() != 0:
            return
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        if any(group.get("momentum") or (group.get("betas") or [0])[0] for group in groups):
            log.warning("ScheduleFree replaces momentum: use optimizer=schedule_free, or set the momentum to 0")
        schedulers = state.schedulers
        schedules = [part for scheduler in schedulers for part in getattr(scheduler, "schedules", [scheduler])]
        if not all(isinstance(schedule, constant) for schedule in schedules):
            log.warning("ScheduleFree replaces a schedule: use scheduler=none")

    def before_train_batch(self, state: State, logger: Logger) -> None:
        if self.warmup.value:
            fraction = min(1.0, state.progress.elapsed_in(self.warmup.unit) / self.warmup.value)
            set_rates(state, lambda rate: rate * fraction)

    def close(self, state: State, logger: Logger) -> None:
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        weights = {key: [*weights] for key, weights in self._weights.items()}
        return {**super().state_dict(), "base": self._base, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._base = dict(state["base"])
        self._weights = {key: _StepWeights(*weights) for key, weights in state["weights"].items()}

    def _put_base(self, optimizer: Optimizer) -> None:
        """Give the optimizer z to step."""
        if not self._average:
            self._average = {name: wide_copy(weight) for name, weight in self._parameters.items()}
            self._base = {name: weight.detach().clone() for name, weight in self._parameters.items()}
        for group in optimizer.param_groups:
            copy_all(self._averaged(group), self._values(self._base, group))

    def _average_base(self, optimizer: Optimizer, index: int) -> None:
        """Take z back from the optimizer, add it to the average, and give the model y."""
        for number, group in enumerate(optimizer.param_groups):
            key = f"{index}.{number}"
            parameters = self._averaged(group)
            base = self._values(self._base, group)
            average = self._values(self._average, group)
            # An intended host-device sync if the learning rate is a tensor on the device.
            self._weights[key], weight = self._weights.get(key, _StepWeights()).next(float(group["lr"]))
            copy_all(base, parameters)
            move_towards(average, base, weight)
            copy_all(parameters, interpolate(base, average, self.beta))
        self._changed()

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        super()._add(name, parameter)
        self._base[name] = parameter.detach().clone()
        self._names[id(parameter)] = name

    def _averaged(self, group: dict[str, Any]) -> list[nn.Parameter]:
        return [parameter for parameter in group["params"] if id(parameter) in self._names]

    def _values(self, tensors: dict[str, Tensor], group: dict[str, Any]) -> list[Tensor]:
        return [tensors[self._names[id(parameter)]] for parameter in self._averaged(group)]
