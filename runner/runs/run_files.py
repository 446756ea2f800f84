"""Runs in a file: a pin, which is a few lines of YAML for a repository. Whoever wrote the file, it is only data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from runner.checkpoints.digest import FILE as DIGESTS
from runner.files.signing import sign
from runner.files.whole import read_bounded, write_whole
from runner.runs.listing import load_plain
from runner.runs.past import ENVIRONMENT

LARGEST_PIN = 4_000_000  # bytes; one of ours has a few thousand
_HEAD = "# A run to verify: python -m runner verify {name}\n"
_unpacked: list[TemporaryDirectory[str]] = []
"""Folders that files were unpacked into; removed when this process ends."""


def unpacked(path: Path) -> Path:
    """Return a new folder with the run that is in a file.

    Raises:
        ValueError: the file holds no run.
    """
    _unpacked.append(TemporaryDirectory(prefix="runner-file-"))
    folder = Path(_unpacked[-1].name) / path.stem
    folder.mkdir()
    _unpack_pin(path, folder)
    return folder


def write_pin(
    path: Path,
    config: Mapping[str, Any],
    overrides: Sequence[str],
    environment: Mapping[str, Any],
    digests: Sequence[Mapping[str, Any]],
) -> None:
    """Write a pin: what a run was made from, and the digests of its first batches.

    Args:
        path: the file.
        config: the config of the run.
        overrides: the overrides in the run's record.
        environment: versions and hardware, from the run's record.
        digests: lines of the run's file of digests.
    """
    record = {"config": dict(config), "overrides": list(overrides)}
    signature = sign([_text(one) for one in record.values()])
    content = {**record, "environment": dict(environment), "signature": signature, "digests": list(map(dict, digests))}
    text = yaml.safe_dump(content, sort_keys=False, width=1000)
    write_whole(path, _HEAD.format(name=path.name) + text)


def _unpack_pin(path: Path, folder: Path) -> None:
    try:
        content = load_plain(read_bounded(path, LARGEST_PIN).decode())
    except (OSError, ValueError) as error:
        raise ValueError(f"run={str(path)!r}: holds no run: {error}") from error
    kinds = {"config": dict, "overrides": list, "environment": dict, "digests": list}
    if not isinstance(content, dict) or not all(isinstance(content.get(key), kind) for key, kind in kinds.items()):
        raise ValueError(f"run={str(path)!r}: holds no run; mode=verify verify.pin=FILE writes such a file")
    (folder / "config.yaml").write_bytes(_text(content["config"]))
    (folder / "overrides.yaml").write_bytes(_text(content["overrides"]))
    (folder / ENVIRONMENT).write_text(json.dumps(content["environment"], default=str))
    (folder / DIGESTS).write_text("".join(json.dumps(one, default=str) + "\n" for one in content["digests"]))
    if isinstance(content.get("signature"), str):
        (folder / "signature").write_text(content["signature"])


def _text(value: Any) -> bytes:
    return yaml.safe_dump(value, sort_keys=False).encode()
