"""Records the history of CUDA memory, and writes it to files for pytorch.org/memory_viz."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from runner.callbacks._disk import disk_errors_reported

if TYPE_CHECKING:
    from runner import Callback, State

log = logging.getLogger("runner")

_max_entries: dict[Callback, int] = {}  # by callback, because torch has only one recording per process


def start(owner: Callback, max_entries: int, state: State) -> bool:
    """Start recording allocations and frees with their stacks, and return whether torch can record any.

    Rank 0 warns if the model is not on CUDA.
    """
    from runner import get_global_rank

    if state.device.type != "cuda":
        if get_global_rank() == 0:
            reason = f"the model is on {state.device.type}, and torch records memory only on CUDA"
            log.warning("%s does nothing: %s", owner.config_key, reason)
        return False
    _max_entries[owner] = max_entries
    _apply()
    return True


def stop(owner: Callback) -> None:
    """Stop recording, unless another callback needs it. Later calls do nothing."""
    if _max_entries.pop(owner, None) is not None:
        _apply()


def write(owner: Callback, state: State) -> Path | None:
    """Write the recording to `{config key}/rank{rank}-ba{batch}.pickle` in the run's folder, whole or not at all.

    Returns:
        The path of the file, or None with a warning if it could not be written.
    """
    from torch.cuda import memory

    from runner import get_global_rank

    path = state.run_dir / owner.config_key / f"rank{get_global_rank()}-ba{state.timestamp.batch}.pickle"
    temporary = path.with_name(f".{path.name}")
    with disk_errors_reported(owner.config_key):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            memory._dump_snapshot(str(temporary))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path
    return None


def _apply() -> None:
    from torch.cuda import memory

    if _max_entries:
        memory._record_memory_history(max_entries=max(_max_entries.values()), stacks="python")
    else:
        memory._record_memory_history(enabled=None)
