"""Records the contents of GPU memory when it runs out."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from runner import Callback
from runner.callbacks import _memory_history
from runner.failures.checks import check_whole

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")


class OOMObserver(Callback):
    """Writes torch's snapshot of CUDA memory when a rank runs out of memory, for pytorch.org/memory_viz.

    From FIT_START on, torch records each allocation and free with its Python stack, and calls this callback when an
    allocation fails, before anything is freed. The snapshot is `oom_observer/rank{rank}-ba{batch}.pickle` in the run's
    folder, where `batch` is the number of batches trained by then; rank 0's is logged as an artifact in the folder
    'oom_observer'. If training continues with halved microbatches, a later failure at the same batch replaces the file.
    If the model is not on CUDA, this warns and does nothing.

    Args:
        max_entries: number of allocations and frees to remember, at least 1.

    Raises:
        ValueError: `max_entries` is out of range.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        check_whole("max_entries", max_entries, 1)
        self.max_entries = max_entries
        self._is_recording: bool | None = None
        self._run: tuple[State, Logger] | None = None  # until it is closed

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._is_recording is None:
            self._run = state, logger
            self._is_recording = _memory_history.start(self, self.max_entries, state)
            if self._is_recording:
                _attach(self)

    def observe(self) -> None:
        """Write the snapshot. Torch calls this when an allocation fails, before it raises."""
        if self._run is None:
            return
        state, logger = self._run
        try:
            if (path := _memory_history.write(self, state)) is not None:
                logger.log_artifact(path, self.config_key)
        except Exception as error:  # must not replace the error that torch is about to raise
            log.warning("%s wrote no snapshot: %s", self.config_key, error)

    def close(self, state: State, logger: Logger) -> None:
        self._run = None
        _memory_history.stop(self)


def _attach(observer: OOMObserver) -> None:
    """Attach an observer to torch, which cannot detach it; a weak reference keeps it from outliving its run."""
    import torch

    reference = weakref.ref(observer)

    def call(device: int, requested: int, total: int, free: int) -> None:
        if (alive := reference()) is not None:
            alive.observe()

    torch._C._cuda_attach_out_of_memory_observer(call)  # pyright: ignore[reportAttributeAccessIssue]
