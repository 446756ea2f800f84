"""Runs torch's profiler over some batches, with the engine's events as named ranges."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from runner import Callback, Event
from runner.callbacks._disk import disk_errors_reported
from runner.callbacks._torch_profile import TorchProfile, is_profiled, write_profile
from runner.failures.checks import check_whole, refuse_if

if TYPE_CHECKING:
    from runner import Logger, State
    from runner.core.hooks import Handler, Hooks

log = logging.getLogger("runner")

# Events at which the profiler may start or stop.
_PHASE_EVENTS = (Event.FIT_START, Event.BATCH_CHECKPOINT, Event.FIT_END)


class TorchProfiler(Callback):
    """Records what torch does on the host and the GPU during a few batches, for ui.perfetto.dev.

    After `skip_first` batches there are `repeat` cycles of `wait`, `warmup` and `active` batches. The active batches of
    each cycle are recorded in one file per rank, `torch_profiler/rank{rank}-ba{first}-ba{last}.json` in the run's
    folder, in Chrome's trace format; rank 0's files are logged as artifacts in the folder 'torch_profiler'. Besides
    torch's operations, a file has ranges for the work between events ('forward', 'backward', ...) and for each
    handler ('batch_end: ema').

    Batches are counted from the start of this process, so a resumed run is profiled again. If training ends within a
    cycle, the recorded batches are written. A cycle is skipped while another profiler is on, because torch supports
    only one at a time.

    Args:
        skip_first: number of batches before the first cycle, at least 0; the first batches are not typical.
        wait: number of batches at the start of a cycle during which the profiler is off, at least 0.
        warmup: number of batches during which it is on but records nothing, because it starts slowly; at least 1.
        active: number of batches to record in a cycle, at least 1.
        repeat: number of cycles, at least 1.
        record_shapes: whether to record the shapes of inputs.
        profile_memory: whether to record allocations.
        with_stack: whether to record source lines, which is slow.
        with_flops: whether to estimate the floating-point operations of matrix products and convolutions.

    Raises:
        ValueError: a number is out of range, or, at FIT_START, the run has a second TorchProfiler.
    """

    def __init__(
        self,
        skip_first: int = 10,
        wait: int = 0,
        warmup: int = 1,
        active: int = 4,
        repeat: int = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
    ) -> None:
        counts = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        for (name, value), least in zip(counts.items(), (0, 0, 1, 1, 1), strict=True):
            check_whole(name, value, least)
        self.skip_first, self.wait, self.warmup, self.active, self.repeat = counts.values()
        self._options: dict[str, Any] = {"record_shapes": record_shapes, "profile_memory": profile_memory}
        self._options |= {"with_stack": with_stack, "with_flops": with_flops}
        self._trained = 0  # number of batches trained by this process
        self._profile: TorchProfile | None = None
        self._has_given_up = False

    def wrap_handler(self, handler: Handler, owner: Hooks, event: Event) -> Handler:
        name = f"{event}: {owner.config_key}"

        @functools.wraps(handler)
        def in_range(state: State, logger: Logger) -> None:
            if self._profile is None:
                handler(state, logger)
            else:
                with self._profile.range(name):
                    handler(state, logger)

        @functools.wraps(handler)
        def while_profiling(state: State, logger: Logger) -> None:
            if self._profile is not None:
                handler(state, logger)

        # The profiler's own handlers get no range: they open ranges that other handlers close. Most do nothing while
        # there is no profile.
        return in_range if owner is not self else handler if event in _PHASE_EVENTS else while_profiling

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if self._profile is not None:
            self._profile.pass_event(event)
        if event is Event.BATCH_CHECKPOINT:
            self._trained += 1
            if self._profile is not None and self._profile.step():
                self._stop()
        if event is Event.FIT_START:
            self._refuse_others(state)
        if event is Event.FIT_END:
            self._stop()
        elif event in _PHASE_EVENTS:
            self._begin_cycle(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        self._stop()
        missing = self.skip_first + self.wait + self.warmup + 1 - self._trained
        if state.error is None and self._trained and missing > 0 and get_global_rank() == 0:
            now = state.timestamp.batch
            message = "%s recorded nothing: it would have begun with batch %d, and training ended with batch %d"
            log.warning(message, self.config_key, now + missing, now)

    def _refuse_others(self, state: State) -> None:
        keys = [callback.config_key for callback in state.callbacks if isinstance(callback, TorchProfiler)]
        refuse_if(len(keys) > 1, "callbacks", keys, "must be a single TorchProfiler; its `repeat` gives more cycles")

    def _begin_cycle(self, state: State, logger: Logger) -> None:
        """Start the profiler if the warm-up of a cycle begins with the next batch."""
        cycle, batch = divmod(self._trained - self.skip_first, self.wait + self.warmup + self.active)
        if not (0 <= cycle < self.repeat and batch == self.wait) or self._has_given_up:
            return
        from runner import get_global_rank

        first = state.timestamp.batch + self.warmup + 1
        if is_profiled():
            last = first + self.active - 1
            log.warning("%s leaves out batches %d to %d: another profiler is active", self.config_key, first, last)
            return

        def write(profile: Any) -> None:
            if (last := state.timestamp.batch) < first:
                return
            self._has_given_up = True  # after a failed write, no more attempts are made
            with disk_errors_reported(self.config_key):
                path = state.run_dir / "torch_profiler" / f"rank{get_global_rank()}-ba{first}-ba{last}.json"
                write_profile(profile, path)
                logger.log_artifact(path, "torch_profiler")
                self._has_given_up = False

        # Each cycle has its own profile: a reused one warns that it discards the previous cycle.
        self._profile = TorchProfile(state.device, self.warmup, self.active, self._options, write)

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
