"""The identity of a failure in training: its type, line and batch, as stored in `crash.zip`."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from runner.failures.errors import RankFailed
from runner.failures.facts import facts_of
from runner.files.addresses import without_credentials

BUNDLE = "crash.zip"
"""In a run's folder: everything needed to reproduce its failure."""
FACTS = "crash.json"
"""In the bundle: the result of `describe_crash`, and the number of the batch."""
BATCH = "batch.safetensors"
"""In the bundle: the tensors of the batch at the failure."""
_LONGEST = 500  # characters of a message


def describe_crash(error: BaseException) -> dict[str, Any]:
    """Return the type and message of an exception, the file, line and function that raised it, and the hook if any.

    Folders are left out, so that a failure has the same description on every machine. For a failure on another rank,
    the rank replaces the line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    location = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
    if isinstance(error, RankFailed):
        location = f"rank {error.rank}"
    message = without_credentials(str(error)).strip().rpartition("\n")[2]
    by = facts_of(error).raised_by
    return {"type": type(error).__name__, "at": location, "by": by, "message": message[:_LONGEST]}
