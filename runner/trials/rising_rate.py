"""Lets the learning rate grow after each batch until the loss diverges, and suggests one of these rates.

The losses are smoothed by a moving average over a tenth of the batches, half of them before and half after a batch: an
average of earlier batches alone would lag, and suggest rates that are several times too large. The suggestion is the
rate at which the smoothed loss falls most steeply over the logarithm of the rate, before its minimum.

The loss has diverged if it is not finite, or if its exponential moving average (weight 0.9 for the past) is four
times the smallest.

Source: Smith, Cyclical Learning Rates for Training Neural Networks, 2017 (arXiv:1506.01186). The automatic choice is
the usual one, as in fastai: Gugger, How Do You Find A Good Learning Rate, 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from runner.core.hooks import Callback
from runner.core.logger import Logger
from runner.core.state import State
from runner.distributed.collectives import all_reduce_sum
from runner.distributed.ranks import get_data_parallel_size
from runner.timing.time import Interval, Timestamp

PAST = 0.9  # weight in the average that detects divergence
DIVERGED = 4.0  # times its smallest value
SMOOTHED = 0.1  # of the batches


class RisingRate(Callback):
    """Records the loss of each batch over all ranks while the rate grows, and ends training when it diverges.

    `base` is the configured rate, which the schedule multiplies.
    """

    def __init__(self, start: float, end: float, batches: int, base: float) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        """The finite loss at each of the rates."""
        self.diverged_at: float | None = None
        """The rate at which the loss diverged; None if it did not."""
        self._start = start
        self._factor = (end / start) ** (1 / (batches - 1))
        self._base = base
        self._reach = max(2, round(SMOOTHED * batches / 2))
        self._mean = 0.0
        self._smallest = math.inf

    def multiplier(self, timestamp: Timestamp) -> float:
        """Return the factor for the configured rates: a schedule."""
        return self._rate(timestamp.batch) / self._base

    def fit_start(self, state: State, logger: Logger) -> None:
        for evaluator in state.evaluators:
            evaluator.eval_interval = Interval(0)  # only the training loss counts

    def batch_end(self, state: State, logger: Logger) -> None:
        # The intended sync: training ends when the loss diverges.
        loss = float(all_reduce_sum(state.total_loss.detach().double().cpu())) / get_data_parallel_size()
        rate = self._rate(state.timestamp.batch - 1)
        if math.isfinite(loss):
            self.rates.append(rate)
            self.losses.append(loss)
            self._mean = PAST * self._mean + (1 - PAST) * loss
        average = self._mean / (1 - PAST ** max(1, len(self.losses)))  # corrected for its start at 0
        self._smallest = min(self._smallest, average)
        if not math.isfinite(loss) or average > DIVERGED * self._smallest:
            self.diverged_at = rate
            state.stop_training()

    @property
    def smoothed(self) -> list[float]:
        """The smoothed loss at each of the rates."""
        reach = self._reach
        windows = [self.losses[max(0, batch - reach) : batch + reach + 1] for batch in range(len(self.losses))]
        return [math.fsum(window) / len(window) for window in windows]

    def suggest(self) -> float | None:
        """Return the rate that the rule suggests; None if the loss never fell."""
        return find_steepest(self.rates, self.smoothed)

    def _rate(self, batch: int) -> float:
        return self._start * self._factor**batch


def find_steepest(rates: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the rate where values fall most steeply over its logarithm before their minimum, or None."""
    lowest = min(range(len(values)), key=values.__getitem__)
    slopes = {
        index: (values[index + 1] - values[index - 1]) / math.log(rates[index + 1] / rates[index - 1])
        for index in range(1, lowest)
    }
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    return rates[steepest] if steepest is not None and slopes[steepest] < 0 else None
