"""What lay in the GPU's memory when it did not suffice."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from runner import Callback
from runner.callbacks import _memory_history
from runner.checks import check_whole

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")


class OOMObserver(Callback):
    """Writes torch's snapshot of CUDA memory when a rank runs out of it, to look at on pytorch.org/memory_viz.

    From FIT_START on, torch notes each allocation and free with the Python stack that asked for it, and calls this when
    an allocation fails, before anything is freed. The snapshot is `oom_observer/rank{rank}-ba{batch}.pickle` in the
    run's folder, `batch` being the batches trained before; rank 0's is logged as an artifact in the folder
    'oom_observer'. Where microbatches are then halved, training goes on, and a later failure at the same batch replaces
    the file. On any other device than CUDA this does nothing, and says so.

    Args:
        max_entries: allocations and frees that are remembered, at least 1.

    Raises:
        ValueError: `max_entries` is out of range.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        check_whole("max_entries", max_entries, 1)
        self.max_entries = max_entries
        self._records: bool | None = None
        self._run: tuple[State, Logger] | None = None  # until it is closed

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._records is None:
            self._run = state, logger
            self._records = _memory_history.start(self, self.max_entries, state)
            if self._records:
                _attach(self)

    def observe(self) -> None:
        """Write the snapshot. Torch calls this when an allocation fails, before it raises."""
        if self._run is None:
            return
        state, logger = self._run
        try:
            if (path := _memory_history.write(self, state)) is not None:
                logger.log_artifact(path, self.config_key)
        except Exception as error:  # which must not take the place of what torch is about to raise
            log.warning("%s wrote no snapshot: %s", self.config_key, error)

    def close(self, state: State, logger: Logger) -> None:
        self._run = None
        _memory_history.stop(self)


def _attach(observer: OOMObserver) -> None:
    """Have torch call an observer. It cannot be told to stop, so what it calls lets go of a run that is over."""
    import torch

    found = weakref.ref(observer)

    def call(device: int, asked: int, total: int, free: int) -> None:
        if (one := found()) is not None:
            one.observe()

    torch._C._cuda_attach_out_of_memory_observer(call)  # pyright: ignore[reportAttributeAccessIssue]
