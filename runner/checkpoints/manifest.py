"""The manifest of a checkpoint: when it was written, and the size and hash of each of its files. Imports no torch.

Whoever wrote the checkpoint, types and ranges of all values are checked here, before anything else is read.
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
LARGEST = 4_000_000  # bytes of a manifest; a file takes about 120
MOST = 2**53  # of any count
RESERVED = ("", LATEST, "best", "config.yaml")  # names beside checkpoints that mean something else


class Manifest(NamedTuple):
    """The content of a manifest."""

    timestamp: Timestamp
    """The time of training at which the checkpoint was written."""
    saved_at: float
    """When it was written, in seconds since 1970."""
    files: dict[str, dict[str, Any]]
    """Size in bytes and SHA-256 of each file by name."""
    save: str | None = None
    """Identity of the save, which its shards have too; None if it has no shards."""


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, given its folder.

    Raises:
        FileNotFoundError: it has none.
        UnreadableCheckpoint: it is damaged, or a later version wrote it.
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
        weights = {"model.pt": files["model.pt"]}  # first
        time = read_time(content["timestamp"])
        saved = number(content["saved_at"])
        return Manifest(time, saved, {**weights, **files}, content.get("save"))
    except (UnreadableCheckpoint, FileNotFoundError):
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableCheckpoint(f"its manifest cannot be read ({error})") from None


def saved_at(path: Path) -> float:
    """Return when a checkpoint was written, by its manifest if possible, since copying changes the times of files."""
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
    """Return a time of training as `Timestamp.state_dict` gave it, after checking its numbers."""
    time = Timestamp.from_state_dict({name: number(value) for name, value in state.items()})
    for part, whole in (("epoch", "iteration"), ("batch", "epoch"), ("sample", "epoch"), ("token", "epoch")):
        if getattr(time, f"{part}_in_{whole}") > getattr(time, part):
            raise ValueError(f"{part}_in_{whole} is more than {part}")
    return time


def number(value: Any) -> Any:
    """Return a number that is finite and at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} is no number")
    if not 0 <= value <= MOST or not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def is_name(name: object) -> bool:
    """Return whether a checkpoint may have this name.

    It is not a path, not hidden, not the name of anything else in its folder, and means the same in an address.
    """
    return (
        isinstance(name, str)
        and name.isprintable()
        and not {"/", "\\"} & {*name}
        and not name.startswith(".")
        and name not in RESERVED
        and unquote(name) == name
    )
