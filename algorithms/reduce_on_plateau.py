"""ReduceOnPlateau: the learning rate falls when a metric stops improving."""

from __future__ import annotations

import logging
import math
from typing import Any

from runner import Algorithm, Logger, State, Time, Timestamp, TimeUnit, get_global_rank
from runner.algorithms._averaging import keep_base_rates, set_rates
from runner.failures.checks import check_number, check_numbers, check_one_of
from runner.failures.errors import wrong_argument
from runner.optim.schedulers import time_axis
from runner.training.metric_choice import MetricChoice, choose_metric

log = logging.getLogger("runner")

UNITS = (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN, TimeUnit.DURATION)


def is_better(value: float, best: float, lower: bool, threshold: float, relative: bool) -> bool:
    """Return whether a value improves on the best one by more than a threshold; NaN never does.

    Let t be the threshold, or the threshold times |best| if it is relative. If lower values are better, the value must
    be below best - t, otherwise above best + t; the magnitude |best| makes this right for negative metrics too.

    Args:
        value: the new value.
        best: the best value so far; before the first, the worst possible: inf or -inf.
        lower: whether lower values are better.
        threshold: how much better the value must be.
        relative: whether the threshold is a fraction of the best value's magnitude, rather than in the metric's unit.
    """
    if math.isinf(best):
        return value < best if lower else value > best
    step = -threshold if lower else threshold
    bound = best * (1 + math.copysign(1, best) * step) if relative else best + step
    return value < bound if lower else value > bound


class ReduceOnPlateau(Algorithm):
    """Multiplies all learning rates by `factor` whenever a metric has not improved for longer than `patience`.

    The metric is read after each evaluation at its interval, and a reduction takes effect at the next batch. After n
    reductions, the rate of a schedule is multiplied by max(minimum, factor^n): use `scheduler=constant
    scheduler.t_warmup=2ep +algorithms=reduce_on_plateau` for a warm-up. Without a schedule, it can also be set as the
    scheduler: `scheduler=reduce_on_plateau`, or `schedulers=ReduceOnPlateau()`. All ranks see the same value, and
    therefore reduce together; the time waited so far counts in a resumed run too.

    Args:
        monitor: name of an evaluator's metric, with or without its label, as in 'eval/loss'; 'loss' is the mean loss.
        mode: 'min' if lower values are better, 'max' if higher ones are; None means lower for names with loss, error or
            perplexity and for metrics that declare it, and higher otherwise.
        factor: factor for the learning rates, above 0 and below 1.
        patience: how long to wait for an improvement, in epochs, batches, samples, tokens or 'dur' ('3ep').
        threshold: how much better than the best value a value must be to count, at least 0.
        threshold_mode: 'rel' for a threshold that is a fraction of the best value's magnitude, 'abs' for one in the
            metric's unit.
        cooldown: time after a reduction that does not count as waiting, in the units of `patience`.
        minimum: the smallest multiplier of the base rates, from 0 to 1.
        eps: smallest change of a learning rate, at least 0: a parameter group keeps its multiplier if a reduction would
            change its base rate by this or less.

    Logs:
        reduce_on_plateau/multiplier: factor of the rates after each evaluation, in (0, 1]; the largest of all parameter
            groups.

    Raises:
        ValueError: an argument is out of range; or, when training starts, no evaluator has the metric, or torch's own
            schedulers are used, which compute each rate from the last one.

    Evidence:
        Some: reductions by hand and by this rule were the standard for image classification (He et al. 2015,
        arXiv:1512.03385). The rule matches torch's `ReduceLROnPlateau`, but patience is a time instead of a number of
        evaluations, and a negative metric must improve by the threshold as well: torch accepts one that got worse.
    """

    conflicts_with = ("ReduceOnPlateau", "ScheduleFree", "SWA")

    def __init__(
        self,
        monitor: str = "loss",
        mode: str | None = None,
        factor: float = 0.1,
        patience: str | int | Time = "10ep",
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: str | int | Time = "0ep",
        minimum: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        check_one_of("mode", mode, (None, "min", "max"))
        check_number("factor", factor, "(0, 1)")
        check_numbers("[0, inf)", threshold=threshold, eps=eps)
        check_one_of("threshold_mode", threshold_mode, ("rel", "abs"))
        check_number("minimum", minimum, "[0, 1]", "a multiplier")
        self.monitor = monitor
        self.mode = mode
        self.factor = factor
        self.patience = _length("patience", patience)
        self.threshold = threshold
        self.threshold_mode = threshold_mode
        self.cooldown = _length("cooldown", cooldown)
        self.minimum = minimum
        self.eps = eps
        self._metric = MetricChoice("eval", monitor)
        self._lower = mode == "min"
        self._multipliers: list[float] = []  # of each parameter group that was reduced
        self._best: float | None = None
        self._waits_since = Timestamp()
        self._reduced_at: Timestamp | None = None

    def before_load(self, state: State, logger: Logger) -> None:
        keep_base_rates(state, self.config_key)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._metric = choose_metric(state, self.monitor)
        if self._metric.label == "train":
            raise wrong_argument("monitor", self.monitor, "must be a metric of an evaluator, such as 'eval/loss'")
        self._lower = self._metric.lower_is_better(state) if self.mode is None else self.mode == "min"
        for length in (self.patience, self.cooldown):
            self._has_passed(state, Timestamp(), length)  # raises if the unit cannot be converted

    def before_train_batch(self, state: State, logger: Logger) -> None:
        if self._multipliers:
            multipliers = iter(self._multipliers)
            set_rates(state, lambda rate: rate * next(multipliers, 1.0))

    def eval_after_all(self, state: State, logger: Logger) -> None:
        evaluator = next(evaluator for evaluator in state.evaluators if evaluator.label == self._metric.label)
        # Evaluations that are not due happen only at the end of a run; a longer run would not have them.
        value = self._metric.read(state) if self._metric.is_fresh(state) and evaluator.is_due(state) else None
        if value is None:
            return
        now = state.timestamp._replace(total_wct=0.0, epoch_wct=0.0, batch_wct=0.0)  # equal runs have equal states
        relative = self.threshold_mode == "rel"
        worst = math.inf if self._lower else -math.inf
        best = worst if self._best is None else self._best
        if is_better(value, best, self._lower, self.threshold, relative):
            self._best = value
            self._waits_since = now
        if self._reduced_at is not None and not self._has_passed(state, self._reduced_at, self.cooldown):
            self._waits_since = now
        if self._has_passed(state, self._waits_since, self.patience):
            self._reduce(state, value, now)
        logger.log_metrics({"reduce_on_plateau/multiplier": max(self._multipliers, default=1.0)})

    def state_dict(self) -> dict[str, Any]:
        return {
            "multipliers": [*self._multipliers],
            "best": self._best,
            "waits_since": self._waits_since.state_dict(),
            "reduced_at": None if self._reduced_at is None else self._reduced_at.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._multipliers = [*state["multipliers"]]
        self._best = state["best"]
        self._waits_since = Timestamp.from_state_dict(state["waits_since"])
        reduced_at = state["reduced_at"]
        self._reduced_at = None if reduced_at is None else Timestamp.from_state_dict(reduced_at)

    def _reduce(self, state: State, value: float, now: Timestamp) -> None:
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        multipliers = self._multipliers + [1.0] * (len(groups) - len(self._multipliers))
        reduced = [max(self.minimum, multiplier * self.factor) for multiplier in multipliers]
        self._multipliers = [
            new if group["initial_lr"] * (old - new) > self.eps else old
            for group, old, new in zip(groups, multipliers, reduced, strict=True)
        ]
        self._waits_since = now
        self._reduced_at = now
        if self._multipliers != multipliers and get_global_rank() == 0:
            metric = f"{self._metric.label}/{self._metric.name}"
            best = "has not been a number so far" if self._best is None else f"is {value:.4g}, best {self._best:.4g}"
            multiplier = max(self._multipliers)
            log.info("batch %d: learning rates now times %.4g, as %s %s", now.batch, multiplier, metric, best)

    def _has_passed(self, state: State, since: Timestamp, time: Time) -> bool:
        """Return whether more than a length of time has passed, in whole batches if the length of epochs is known."""
        unit = state.max_duration.unit if time.unit is TimeUnit.DURATION else time.unit
        length, position = time_axis(unit, state.max_duration, state.train_dataloader_len)
        return position(state.timestamp) - position(since) > length(time)


def _length(name: str, value: str | int | Time) -> Time:
    time = Time.parse_or_epochs(value, name)
    if time.unit not in UNITS:
        raise wrong_argument(name, str(time), "must be in ep, ba, sp, tok or dur, such as '3ep'")
    return time
