"""Records which handlers ran at which event, in order and for how long: a timeline and a table of costs."""

from __future__ import annotations

import functools
import json
import time
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from runner import Callback, Event
from runner.callbacks._cost_table import COLUMNS, make_rows, print_rows
from runner.callbacks._disk import disk_errors_reported
from runner.callbacks._timeline import Call, draw
from runner.failures.checks import check_whole
from runner.files.whole import write_atomically

if TYPE_CHECKING:
    from runner import Logger, State
    from runner.core.hooks import Handler, Hooks

# The label of the time between handlers, from one of these events to the next.
_IN_STEPS, _OUTSIDE, _NOWHERE = range(3)
_LABELS = {
    Event.FIT_START: _OUTSIDE,
    Event.BEFORE_DATALOADER: _IN_STEPS,
    Event.EVAL_BEFORE_ALL: _OUTSIDE,
    Event.EPOCH_END: _OUTSIDE,
    Event.FIT_END: _NOWHERE,
    Event.EVAL_STANDALONE_START: _OUTSIDE,
    Event.EVAL_STANDALONE_END: _NOWHERE,
    Event.PREDICT_START: _OUTSIDE,
    Event.PREDICT_END: _NOWHERE,
}


class EventTrace(Callback):
    """Measures every algorithm, callback and logger destination at every event.

    It measures the time spent on the training thread, not the work done on other threads, processes or a GPU. Each call
    costs half a microsecond; a run without this callback pays nothing. All ranks measure.

    When the run closes, even after an error, each rank writes a timeline to `event_trace/rank{rank}-ba{batch}.json` in
    the run's folder, where `batch` is the batch at which this process began. It is in Chrome's trace format, for
    ui.perfetto.dev: ranges (epoch, batch, forward, ...) enclose events, and events enclose the handlers that ran. Rank
    0's timeline is logged as an artifact in the folder 'event_trace'. A resumed run has its own timeline, but its table
    covers the whole run. The folder and the table are named after the config key, by default 'event_trace'.

    Args:
        max_spans: maximum number of calls in the timeline, at least 0; it keeps the first ones, about 130 bytes each.
        print_table: whether rank 0 prints the costliest rows of the table at the end.

    Raises:
        ValueError: `max_spans` is less than 0.

    Logs:
        event_trace: a table with a row per callback and event, which has the number of calls, total milliseconds and
            microseconds per call. The first part holds the events of a training batch, with microseconds per step and
            the share of the step's time; the second holds those of epochs, evaluation, prediction, start and end. Every
            row has its share of the run, which is the time of fit, evaluation and prediction and of the handlers before
            them. Both parts start with the costliest row and include 'everything else' (model, optimizer, data and the
            engine). Each kind of share adds up to 1.
    """

    def __init__(self, max_spans: int = 20_000, print_table: bool = False) -> None:
        check_whole("max_spans", max_spans, 0, "a number of calls")
        self.max_spans = max_spans
        self.print_table = print_table
        self._names: list[tuple[str, Event]] = []
        self._costs: dict[tuple[str, str], list[int]] = {}  # calls and nanoseconds, by callback and event
        self._spans = array("q")  # for each call: index in `_names`, begin and end in nanoseconds
        self._between = [0, 0, 0]  # nanoseconds between handlers, by label
        self._label = _NOWHERE
        self._batches = self._last_end = 0  # number of batches; when the last handler ended, in nanoseconds
        self._first_batch: int | None = None

    def wrap_handler(self, handler: Handler, owner: Hooks, event: Event) -> Handler:
        index = len(self._names)
        self._names.append((owner.config_key, event))
        clock = time.perf_counter_ns
        spans = self._spans
        limit = 3 * self.max_spans

        @functools.wraps(handler)
        def marked(state: State, logger: Logger) -> None:
            if len(spans) < limit:
                now = clock()
                spans.extend((index, now, now))

        if owner is self and event is not Event.BATCH_END and event not in _LABELS:
            return marked  # it handles this event only to show it in the timeline
        cost = self._costs.setdefault((owner.config_key, event.value), [0, 0])

        @functools.wraps(handler)
        def timed(state: State, logger: Logger) -> None:
            began = clock()
            self._between[self._label] += began - self._last_end
            try:
                handler(state, logger)
            finally:
                self._last_end = ended = clock()
                cost[0] += 1
                cost[1] += ended - began
                if len(spans) < limit:
                    spans.extend((index, began, ended))

        return timed

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BATCH_END:
            self._batches += 1
        else:
            self._label = _LABELS[event]
            if self._first_batch is None:
                self._first_batch = state.timestamp.batch

    def close(self, state: State, logger: Logger) -> None:
        if self._first_batch is None:
            return
        from runner import get_global_rank

        rank = get_global_rank()
        path = state.run_dir / self.config_key / f"rank{rank}-ba{self._first_batch}.json"
        with disk_errors_reported(self.config_key):
            write_atomically(path, json.dumps({"traceEvents": list(draw(self._calls(), rank))}).encode())
            logger.log_artifact(path, self.config_key)
        rows = make_rows(self._costs, self._batches, self._between[_IN_STEPS], self._between[_OUTSIDE])
        logger.log_table(COLUMNS, rows, self.config_key)
        if self.print_table and rank == 0:
            print_rows(rows, self._batches)

    def state_dict(self) -> dict[str, Any]:
        costs = [[*key, *cost] for key, cost in self._costs.items()]
        return {
            "costs": costs,
            "batches": self._batches,
            "rest": self._between[_IN_STEPS],
            "rest_outside": self._between[_OUTSIDE],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches = state["batches"]
        self._between = [state["rest"], state.get("rest_outside", 0), 0]  # older checkpoints lack it
        for owner, event, calls, nanoseconds in state["costs"]:
            cost = self._costs.setdefault((owner, event), [0, 0])
            cost[0] += calls
            cost[1] += nanoseconds

    def _calls(self) -> Iterator[Call]:
        numbers = iter(self._spans)
        for index, began, ended in zip(numbers, numbers, numbers, strict=True):
            owner, event = self._names[index]
            yield Call(event, "" if owner == self.config_key else owner, began, ended)
