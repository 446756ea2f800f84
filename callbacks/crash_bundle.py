"""Leaves a file from which a failure in training can be had again, on any machine."""

from __future__ import annotations

import json
import logging
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import Callback
from runner.callbacks._disk import disk_errors_reported
from runner.failures.crash import BATCH, BUNDLE, FACTS, describe_crash
from runner.failures.facts import RankFailed

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

RECORD = ("config.yaml", "overrides.yaml", "environment.json", "git.patch", "signature", "digests.jsonl")
MOST_CODE = 12_000_000  # bytes of modules
MEGABYTE = 1_000_000


class CrashBundle(Callback):
    """Leaves `crash.zip` in the run's folder if training fails: `runner replay crash.zip` fails in the same way.

    It holds the run's record with the modules that were kept, the newest checkpoint, and the tensors of the batch on
    rank 0, as far as they fit into `max_size`; never a file from outside of the run's folder, nor an environment
    variable. The record has no passwords. A run that fails before its first batch is trained leaves none, as `rerun=`
    shows the same. A hook that fails at EPOCH_CHECKPOINT, after the checkpoint of that moment was written, is not
    called again by a replay. Rank 0 writes the file when the run closes, and logs it as an artifact. Place the callback
    after the one that saves checkpoints.

    Args:
        max_size: megabytes that the file may have, above 0; a checkpoint that does not fit is left out, and the replay
            then begins with the run.

    Raises:
        ValueError: `max_size` is not above 0.
    """

    def __init__(self, max_size: float = 500.0) -> None:
        if not max_size > 0:
            raise ValueError(f"max_size={max_size!r}: must be a number of megabytes above 0")
        self.max_size = max_size

    def close(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        error = state.error
        has_record = (state.run_dir / "config.yaml").is_file()
        has_begun = self.has_trained and state.timestamp.batch > 0
        if not isinstance(error, Exception) or not has_begun or not has_record or get_global_rank() != 0:
            return
        path = state.run_dir / BUNDLE
        with disk_errors_reported(self.config_key):
            self._write(path, state, error)
            logger.log_artifact(path)
            hint = f"to see it fail again, here or on another machine: python -m runner replay {path}"
            if isinstance(error, RankFailed):  # it is printed as the other rank wrote it
                log.info(hint)
            else:
                error.add_note(hint)

    def _write(self, path: Path, state: State, error: Exception) -> None:
        from safetensors.torch import save

        facts = {**describe_crash(error), "epoch": state.timestamp.epoch, "batch": state.timestamp.batch + 1}
        room = self.max_size * MEGABYTE
        partial = path.with_name(f".{path.name}.partial")
        try:
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
                file.writestr(FACTS, json.dumps(facts, indent=1))
                room -= _add(file, state.run_dir, _record(state.run_dir), math.inf)
                content = save(dict(_tensors("batch", getattr(state, "batch", None))))
                if len(content) < room / 2:
                    file.writestr(BATCH, content)
                    room -= len(content)
                _add(file, state.run_dir, _checkpoint(state.run_dir), room)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _add(file: zipfile.ZipFile, folder: Path, paths: list[Path], room: float) -> int:
    """Add all of some files, or none if they do not fit, and return their size in bytes."""
    size = sum(one.stat().st_size for one in paths)
    if size > room:
        log.warning("%s: %s and %d more files do not fit into max_size", BUNDLE, paths[0].name, len(paths) - 1)
        return 0
    for one in paths:
        stored = zipfile.ZIP_STORED if one.suffix == ".pt" else None  # weights hardly shrink
        file.write(one, one.relative_to(folder).as_posix(), compress_type=stored)
    return size


def _record(folder: Path) -> list[Path]:
    modules = (one for one in sorted(folder.glob("code/**/*")) if "__pycache__" not in one.parts)
    code = [one for one in modules if _is_inside(one, folder)]
    if sum(one.stat().st_size for one in code) > MOST_CODE:
        code = []
    return [*(folder / name for name in RECORD if _is_inside(folder / name, folder)), *code]


def _checkpoint(folder: Path) -> list[Path]:
    """Return the files of the newest checkpoint from which the run can be resumed; none if there is none."""
    from runner.checkpoints.files import find_checkpoint

    try:
        found = find_checkpoint(folder)
    except FileNotFoundError:
        return []
    files = [one for one in sorted(found.iterdir()) if _is_inside(one, folder.resolve())]
    is_whole = (found / "state.pt") in files and found.is_relative_to(folder.resolve())
    return [folder / one.relative_to(folder.resolve()) for one in files] if is_whole else []


def _is_inside(path: Path, folder: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.resolve().is_relative_to(folder.resolve())


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a batch by name, on the CPU."""
    from runner.batch import tensors

    for number, one in enumerate(tensors(value)):
        if not (one.is_meta or one.is_nested or one.is_sparse):
            yield f"{name}.{number}", one.detach().cpu().contiguous().clone()
