"""The clock of a training run: elapsed time and signals, on which all ranks agree at regular intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from runner.distributed.ranks import get_global_rank, get_world_size
from runner.distributed.session import SESSION_OVER
from runner.distributed.signals import Interrupt
from runner.distributed.store import agreed_to_end

PERIOD = 1.0  # seconds between two agreements of the ranks on time and signals
MOST_BATCHES = 1000  # between two agreements, however short the batches are


class Clock:
    """Measures training time and notices signals; all ranks see the same values at the same batch.

    A single process measures at every `beat`. Several ranks agree about once per `PERIOD`, by one small all-reduce on
    the host: it shares rank 0's elapsed time, a signal that any rank received, and the number of batches until the next
    agreement, which rank 0 chooses. Beats in between report no time and no signal. Wall-clock durations, intervals and
    schedules therefore take effect at the same batch on all ranks, without communication in every batch.

    Args:
        interrupt: remembers the signal that this process received.
        session: seconds from the start, evaluations included, after which `signal` becomes `SESSION_OVER`.
    """

    def __init__(self, interrupt: Interrupt, session: float = math.inf) -> None:
        self.signal = 0
        """Number of the signal that asks the run to end, or `SESSION_OVER`; 0 for no signal."""
        self._session = session
        self._end = math.inf
        self._interrupt = interrupt
        now = time.perf_counter()
        self._last = now
        self._agreed = now
        self._elapsed = 0.0
        self._batches = 1
        self._remaining = 1
        self._is_alone = get_world_size() == 1
        self.beat: Callable[[], float] = self._beat_alone if self._is_alone else self._beat_together
        """Updates `signal` and returns the seconds to add to the timestamp after a batch; the same on all ranks."""

    def start(self) -> None:
        """Start the clock; time that passed before does not count."""
        self._end = time.perf_counter() + self._session
        self._elapsed = 0.0
        self.resume()

    def stop(self) -> None:
        """Agree once more at the end of training, so that no signal is lost. All ranks."""
        self._end = math.inf  # there is nothing left to pause
        self._remaining = 1
        self.beat()

    def pause(self) -> None:
        """Stop the clock during an evaluation."""
        self._elapsed = time.perf_counter() - self._last

    def resume(self) -> None:
        """Restart the clock. A single process also notices a signal that arrived during the pause."""
        self._last = time.perf_counter() - self._elapsed
        if self._is_alone:
            self.signal = self._interrupt.signal

    def _beat_alone(self) -> float:
        now = time.perf_counter()
        self.signal = self._interrupt.signal or (SESSION_OVER if now >= self._end else 0)
        elapsed = now - self._last
        self._last = now
        return elapsed

    def _beat_together(self) -> float:
        self._remaining -= 1
        if self._remaining:
            return 0.0
        elapsed = self._beat_alone()
        is_rank_zero = get_global_rank() == 0
        now = time.perf_counter()
        since = now - self._agreed  # includes evaluations
        self._agreed = now
        batches = min(MOST_BATCHES, max(1, round(self._batches * PERIOD / max(since, 1e-9))))
        vote = [float(self.signal), elapsed, float(batches)] if is_rank_zero else [float(self.signal), 0.0, 0.0]
        votes = torch.tensor(vote, dtype=torch.float64)
        dist.all_reduce(votes, dist.ReduceOp.MAX)  # on the CPU: nothing waits for a device
        signal, elapsed, batches = votes.tolist()
        self.signal = int(signal)
        self._batches = int(batches)
        if self.signal:
            agreed_to_end.set()
        self._remaining = self._batches
        return elapsed
