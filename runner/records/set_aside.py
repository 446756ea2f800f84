"""Moves later checkpoints away when a run resumes from an earlier one."""

from __future__ import annotations

import shutil
from pathlib import Path

from runner.checkpoints.manifest import MANIFEST, saved_at


def set_aside_later(path: Path, into: Path) -> list[str]:
    """Move the checkpoints saved after the one at `path` to the folder `into`, and return their names.

    The resumed run does not continue from them, and may diverge from them.

    Raises:
        OSError: a checkpoint cannot be moved.
    """
    later = [manifest.parent for manifest in path.parent.glob(f"[!.]*/{MANIFEST}") if not manifest.parent.is_symlink()]
    later = sorted((checkpoint for checkpoint in later if saved_at(checkpoint) > saved_at(path)), key=saved_at)
    for checkpoint in reversed(later):  # newest first, so that a kill leaves no gap
        into.mkdir(parents=True, exist_ok=True)
        shutil.move(checkpoint, into / checkpoint.name)
    for link in path.parent.iterdir() if later else ():
        if link.is_symlink() and not link.exists():
            link.unlink()
    return [checkpoint.name for checkpoint in later]
