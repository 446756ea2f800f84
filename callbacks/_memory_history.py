"""Torch's record of CUDA memory: kept while somebody wants it, written as files for pytorch.org/memory_viz."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from runner.callbacks._disk import disk_errors_reported

if TYPE_CHECKING:
    from runner import Callback, State

log = logging.getLogger("runner")

_wanted: dict[Callback, int] = {}  # entries, by who wants them: torch keeps one record a process


def start(owner: Callback, max_entries: int, state: State) -> bool:
    """Begin to record allocations and frees with their stacks, and return whether there is anything to record.

    Where the model is not on CUDA, that is said, on rank 0.
    """
    from runner import get_global_rank

    if state.device.type != "cuda":
        if get_global_rank() == 0:
            reason = f"the model is on {state.device.type}, and torch records memory on CUDA alone"
            log.warning("%s does nothing: %s", owner.config_key, reason)
        return False
    _wanted[owner] = max_entries
    _apply()
    return True


def stop(owner: Callback) -> None:
    """End the recording, where nobody else wants it. May be called again."""
    if _wanted.pop(owner, None) is not None:
        _apply()


def write(owner: Callback, state: State) -> Path | None:
    """Write what was recorded to `{config key}/rank{rank}-ba{batch}.pickle` in the run's folder, all of it or nothing.

    Returns:
        The file; None where the disk refused it, which is said.
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

    if _wanted:
        memory._record_memory_history(max_entries=max(_wanted.values()), stacks="python")
    else:
        memory._record_memory_history(enabled=None)
