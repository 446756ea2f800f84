"""Reads runs from single files: the bundle of a crash, or a pin, which is a few lines of YAML for a repository.

Anyone may have written the file, so it is treated as data: the names, kinds and sizes of its entries are checked before
any of them is unpacked, and its record counts as another user's unless this user's key signed it.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from runner.checkpoints.digest import DIGESTS
from runner.failures.checks import refuse_if
from runner.failures.crash import BATCH, BUNDLE, FACTS
from runner.failures.errors import wrong_argument
from runner.files.names import CODE, CONFIG, ENVIRONMENT, OVERRIDES, RECORD, SIGNATURE
from runner.files.signing import sign
from runner.files.whole import read_bounded, write_atomically
from runner.records.plain_yaml import load_plain
from runner.terminal.commands import show_command

LARGEST_PIN = 4_000_000  # bytes; the runner's own have a few thousand
LARGEST = 20_000_000_000  # bytes of a bundle, unpacked
LARGEST_RATIO = 60  # of unpacked to packed bytes: text and code shrink to a tenth
MOST_FILES = 5_000
_PART = r"[\w+=-][\w.+=-]*"  # a name that is neither hidden nor `..`
_SHARD = r"shard-\d+-of-\d+\.safetensors"
_NAMES = re.compile(
    rf"{'|'.join(map(re.escape, RECORD))}|{DIGESTS}|{FACTS}|{BATCH}"
    rf"|{CODE}(/{_PART})+|{_PART}/{_PART}/(model\.pt|state\.pt|config\.json|manifest\.json|{_SHARD})"
)
"""Files that a bundle may contain: a record, modules, and a checkpoint."""
_HEAD = "# A run to verify: {command}\n"
_unpacked: list[TemporaryDirectory[str]] = []
"""Folders with unpacked files; removed when this process ends."""


def unpacked(path: Path) -> Path:
    """Unpack the run in a file into a new folder, and return the folder."""
    _unpacked.append(TemporaryDirectory(prefix="runner-file-"))
    folder = Path(_unpacked[-1].name) / path.stem
    folder.mkdir()
    if zipfile.is_zipfile(path):
        try:
            _unpack_bundle(path, folder)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise wrong_argument("RUN", str(path), f"is not a complete crash.zip: {error}") from error
    else:
        _unpack_pin(path, folder)
    return folder


def write_pin(
    path: Path,
    config: Mapping[str, Any],
    overrides: Sequence[str],
    environment: Mapping[str, Any],
    digests: Sequence[Mapping[str, Any]],
) -> None:
    """Write a pin: what a run was made from, and the digests of its first batches."""
    record = {"config": dict(config), "overrides": list(overrides)}
    signature = sign([_text(content) for content in record.values()])
    content = {**record, "environment": dict(environment), "signature": signature, "digests": list(map(dict, digests))}
    text = yaml.safe_dump(content, sort_keys=False, width=1000)
    write_atomically(path, _HEAD.format(command=show_command("verify", path.name)) + text)


def _unpack_bundle(path: Path, folder: Path) -> None:
    """Unpack a crash.zip after checking all of its entries."""
    with zipfile.ZipFile(path) as file:
        entries = file.infolist()
        names = [entry.filename for entry in entries]
        most = min(LARGEST, LARGEST_RATIO * path.stat().st_size + LARGEST_PIN)
        if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > most:
            raise wrong_argument("RUN", str(path), f"would unpack to more than {most:,} bytes or {MOST_FILES:,} files")
        for entry in entries:
            is_plain = stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG) and not entry.flag_bits & 1
            if not is_plain or not _NAMES.fullmatch(entry.filename) or names.count(entry.filename) > 1:
                reason = f"holds {entry.filename!r}, which does not belong in a crash.zip"
                raise wrong_argument("RUN", str(path), reason)
        refuse_if(CONFIG not in names, "RUN", str(path), f"contains no run; a run that fails leaves a {BUNDLE}")
        for entry in entries:
            target = folder / entry.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            with file.open(entry) as source, target.open("xb") as copy:
                shutil.copyfileobj(source, copy)  # never more than the size that was checked


def _unpack_pin(path: Path, folder: Path) -> None:
    try:
        content = load_plain(read_bounded(path, LARGEST_PIN).decode())
    except (OSError, ValueError) as error:
        raise wrong_argument("RUN", str(path), f"contains no run: {error}") from error
    kinds = {"config": dict, "overrides": list, "environment": dict, "digests": list}
    if not isinstance(content, dict) or not all(isinstance(content.get(key), kind) for key, kind in kinds.items()):
        raise wrong_argument("RUN", str(path), "contains no run; runner verify RUN --pin FILE writes such a file")
    (folder / CONFIG).write_bytes(_text(content["config"]))
    (folder / OVERRIDES).write_bytes(_text(content["overrides"]))
    (folder / ENVIRONMENT).write_text(json.dumps(content["environment"], default=str))
    (folder / DIGESTS).write_text("".join(json.dumps(line, default=str) + "\n" for line in content["digests"]))
    if isinstance(content.get("signature"), str):
        (folder / SIGNATURE).write_text(content["signature"])


def _text(value: Any) -> bytes:
    return yaml.safe_dump(value, sort_keys=False).encode()
