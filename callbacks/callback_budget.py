"""Says which callbacks cost more of the training time than they may together."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner import Callback, Event, Interval, Time
from runner.callbacks._cost_table import IN_STEP

if TYPE_CHECKING:
    from runner import Logger, State
    from runner.hooks import Handler, Hooks

log = logging.getLogger("runner")

COLUMNS = ("callback", "share", "us per step", "ms outside of steps", "waits per step", "key", "now", "enough")
GOLDEN = (math.sqrt(5) - 1) / 2
SAMPLED = 0.2  # share of the batches that are measured
SKIPPED = 10  # batches at the beginning that are not: much is loaded in them
EACH = 5  # of this many measured batches, the waits are counted in one and the others are timed
LEAST = 10  # timed batches before costs are judged, and judged again after ten times that number
ONCE = {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START, Event.FIT_END}  # no share of any time
_NOT, _TIMED, _COUNTED = range(3)


def is_sampled(batch: int) -> bool:
    """Return whether a batch of the session, counted from 0, is measured: a fifth are, and a fifth of every tenth."""
    # Multiples of the golden ratio are spread evenly modulo 1, and so are those of any number times it.
    return batch >= SKIPPED and batch * GOLDEN % 1 < SAMPLED


@dataclass
class _Cost:
    """Cost of the handlers of one callback, in nanoseconds; `longest` is the longest call within a step."""

    owner: Hooks
    inside: int = 0
    longest: int = 0
    outside: int = 0
    waits: int = 0


class CallbackBudget(Callback):
    """Names the callbacks and destinations that together take more than a share of the training time.

    It measures the time that they spend on the training thread in 4 of 25 batches, chosen so that callbacks with an
    interval are met as often as they act, and outside of batches always; in one of 25 it counts how often they wait for
    the device. The longest call of each within batches counts once, as it may load a library; what happens once a run,
    at FIT_START and FIT_END, does not count, nor does what the Trainer itself logs. Costs are judged after about 70
    batches, 700 and so on, and at the end. Rank 0 alone measures and judges. `EventTrace` measures every batch.

    Args:
        share: share of the time from FIT_START on that callbacks may take together, in (0, 1).
        strict: whether to end the run with an error, as in continuous integration, rather than to warn once.

    Raises:
        ValueError: `share` is out of range.
        RuntimeError: during training, with `strict`, if callbacks take more than `share`; the message names them.

    Logs:
        callback_budget: a table with a row per callback, costliest first: its share of the time, microseconds per step,
            milliseconds outside of steps, waits for the device per step, and, where too much is spent, the key of its
            interval, its value now, and the value that would bring all callbacks below `share` if each acted that much
            more rarely; named after the config key.
    """

    def __init__(self, share: float = 0.03, strict: bool = False) -> None:
        if isinstance(share, bool) or not 0 < share < 1:
            raise ValueError(f"share={share!r}: must be a share of the training time, above 0 and below 1")
        self.share = share
        self.strict = strict
        self._costs: dict[str, _Cost] = {}
        self._doing = _NOT
        self._began = self._ended = self._batches = self._timed = self._counted = 0
        self._next_look = LEAST
        self._warned = False

    def wrap_handler(self, handler: Handler, owner: Hooks, event: Event) -> Handler:
        from runner import get_global_rank
        from runner.metrics import TrainerLog, TrainMetrics

        others = isinstance(owner, Callback) and owner is not self and not isinstance(owner, TrainMetrics | TrainerLog)
        if not others or event in ONCE or get_global_rank() != 0:
            return handler
        cost = self._costs.setdefault(owner.config_key, _Cost(owner))
        clock = time.perf_counter_ns
        in_step = event in IN_STEP

        @functools.wraps(handler)
        def measured(state: State, logger: Logger) -> None:
            if in_step and self._doing == _NOT:
                handler(state, logger)
            elif in_step and self._doing == _COUNTED:
                from runner.callbacks._waits import Waits

                with Waits() as waits:
                    handler(state, logger)
                cost.waits += waits.count
            else:
                began = clock()
                handler(state, logger)
                spent = clock() - began
                if in_step:
                    cost.inside += spent
                    cost.longest = max(cost.longest, spent)
                else:
                    cost.outside += spent

        return measured

    def fit_start(self, state: State, logger: Logger) -> None:
        for cost in self._costs.values():
            cost.inside = cost.longest = cost.outside = cost.waits = 0
        self._batches = self._timed = self._counted = 0
        self._next_look = LEAST
        self._began = self._ended = time.perf_counter_ns()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        sampled = is_sampled(self._batches)
        counts = sampled and (self._timed + self._counted) % EACH == EACH - 1
        self._doing = _NOT if not sampled else _COUNTED if counts else _TIMED

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._batches += 1
        self._timed += self._doing == _TIMED
        self._counted += self._doing == _COUNTED
        self._doing = _NOT
        self.epoch_checkpoint(state, logger)
        if self._timed == self._next_look:
            self._next_look *= 10
            self._judge(logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._ended = time.perf_counter_ns()

    def fit_end(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        if self._timed < LEAST:
            if get_global_rank() == 0:
                short = "%s judges nothing: of %d batches it has timed %d, and needs %d"
                log.log(
                    logging.WARNING if self.strict else logging.INFO,
                    short,
                    self.config_key,
                    self._batches,
                    self._timed,
                    LEAST,
                )
            return
        self._judge(logger, is_last=True)

    def _judge(self, logger: Logger, is_last: bool = False) -> None:
        elapsed = max(1, self._ended - self._began)
        scale = (self._batches - 1) / (self._timed - 1)  # of all calls but the longest
        rows = []
        for key, cost in self._costs.items():
            inside = (cost.inside - cost.longest) * scale + cost.longest
            share = (inside + cost.outside) / elapsed
            rows.append(
                [key, share, inside / 1e3 / self._batches, cost.outside / 1e6, cost.waits / max(1, self._counted)]
            )
        rows.sort(key=lambda row: -row[1])
        total = sum(row[1] for row in rows)
        too_much = total > self.share
        factor = math.ceil(total / self.share)
        for row in rows:
            row += _longer(self._costs[row[0]].owner, factor) if too_much else [None, None, None]
        if is_last and rows:
            logger.log_table(COLUMNS, rows, self.config_key)
        if not too_much or not rows:
            return
        costly = [row for row in rows if row[1] >= 0.1 * total]
        message = (
            f"callbacks take {total:.1%} of the time, more than {self.config_key}.share={self.share!r}: "
            + "; ".join(map(_describe, costly))
        )
        if self.strict:
            raise RuntimeError(message)
        if not self._warned:
            self._warned = True
            log.warning("%s", message)


def _longer(owner: Hooks, factor: int) -> list[Any]:
    """Return the argument that sets how often a callback acts, its value, and a value larger by a factor; or None."""
    for name in inspect.signature(type(owner)).parameters:
        if name == "interval" or name.endswith("_interval"):
            value = getattr(owner, name, getattr(owner, "interval", None))
            now = value.time if isinstance(value, Interval) else value
            if isinstance(now, Time) and now.value:
                return [name, str(now), str(Time(now.value * factor, now.unit))]
            if isinstance(now, int) and now:
                return [name, str(now), str(now * factor)]
            return [name, None, None]
    return [None, None, None]


def _describe(row: list[Any]) -> str:
    key, share, per_step, outside, waits, name, now, enough = row
    costs = f"{per_step:.0f} us a step, {outside:.0f} ms outside of steps, {waits:.1f} waits for the device a step"
    remedy = "it has no interval: remove it"
    if name is not None:
        remedy = f"set callbacks.{key}.{name}"
        remedy += "" if enough is None else f"={enough}, it is {now}"
    return f"{key} {share:.1%} ({costs}; {remedy})"
