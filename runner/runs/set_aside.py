"""What becomes of checkpoints when a run goes on from an earlier one of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from runner.checkpoints.files import MANIFEST, saved_at


def set_aside_later(path: Path, into: Path) -> list[str]:
    """Move the checkpoints that were saved after one away, and return their names: what comes now is another future.

    Args:
        path: the checkpoint that a run goes on from.
        into: a folder; made when there is something to move.

    Raises:
        OSError: they cannot be moved.
    """
    later = [one.parent for one in path.parent.glob(f"[!.]*/{MANIFEST}") if not one.parent.is_symlink()]
    later = sorted((one for one in later if saved_at(one) > saved_at(path)), key=saved_at)
    for one in reversed(later):  # the newest first: at any moment the one that is used is of one future
        into.mkdir(parents=True, exist_ok=True)
        shutil.move(one, into / one.name)
    for link in path.parent.iterdir() if later else ():
        if link.is_symlink() and not link.exists():
            link.unlink()
    return [one.name for one in later]
