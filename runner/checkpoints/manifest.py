"""The manifest of a checkpoint: its time, and the size and hash of each of its files. torch is not imported.

A checkpoint may come from anyone, so the types and ranges of all values are checked before anything else is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from runner.failures.errors import UnreadableCheckpoint
from runner.files.whole import read_bounded
from runner.timing.time import Timestamp

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"  # link beside a run's checkpoints
LARGEST = 4_000_000  # bytes of a manifest; each file takes about 120
MOST = 2**53  # largest number allowed
RESERVED = ("", LATEST, "best", "config.yaml")  # names with another meaning beside checkpoints


class Manifest(NamedTuple):
    """The content of a manifest."""

    timestamp: Timestamp
    """The training time of the checkpoint."""
    saved_at: float
    """Time of writing, in seconds since 1970."""
    files: dict[str, dict[str, Any]]
    """Size in bytes and SHA-256 of each file by name."""
    save: str | None = None
    """ID of the save, which is also in its shards; None for a checkpoint without shards."""


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in a folder.

    Raises:
        FileNotFoundError: the folder has no manifest.
        UnreadableCheckpoint: the manifest is damaged, or a later version wrote it.
    """
    try:
        content = json.loads(read_bounded(path / MANIFEST, LARGEST))
        if content["format"] > FORMAT:
            reason = f"it has format {content['format']}, which a later version of this project wrote"
            raise UnreadableCheckpoint(reason)
        files = {
            name: {"size": number(facts["size"]), "sha256": str(facts["sha256"])}
            for name, facts in content["files"].items()
        }
        weights = {"model.pt": files["model.pt"]}  # the first file to verify
        time = read_time(content["timestamp"])
        saved = number(content["saved_at"])
        return Manifest(time, saved, {**weights, **files}, content.get("save"))
    except (UnreadableCheckpoint, FileNotFoundError):
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableCheckpoint(f"its manifest cannot be read ({error})") from None


def saved_at(path: Path) -> float:
    """Return when a checkpoint was written, from its manifest if possible, because copying changes file times."""
    try:
        return read_manifest(path).saved_at
    except FileNotFoundError:
        return 0.0
    except UnreadableCheckpoint:
        try:
            return (path / MANIFEST).stat().st_mtime
        except OSError:
            return 0.0


def read_time(state: Mapping[str, Any]) -> Timestamp:
    """Return the training time that `Timestamp.state_dict` wrote, after checking its numbers."""
    time = Timestamp.from_state_dict({name: number(value) for name, value in state.items()})
    for part, whole in (("epoch", "iteration"), ("batch", "epoch"), ("sample", "epoch"), ("token", "epoch")):
        if getattr(time, f"{part}_in_{whole}") > getattr(time, part):
            raise ValueError(f"{part}_in_{whole} is more than {part}")
    return time


def number(value: Any) -> Any:
    """Check that a value is a number from 0 to `MOST`, and return it; raise TypeError or ValueError if not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} is not a number")
    if not 0 <= value <= MOST or not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def is_name(name: object) -> bool:
    """Return whether a checkpoint may have this name.

    It must not be a path, hidden, or reserved for something else in the folder, and must mean the same in a URL.
    """
    return (
        isinstance(name, str)
        and name.isprintable()
        and not {"/", "\\"} & {*name}
        and not name.startswith(".")
        and name not in RESERVED
        and unquote(name) == name
    )
