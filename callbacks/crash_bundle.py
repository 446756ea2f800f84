"""Writes a file that reproduces a failure of training on any machine."""

from __future__ import annotations

import json
import logging
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from runner import Callback, Event
from runner.callbacks._disk import disk_errors_reported
from runner.checkpoints.digest import DIGESTS
from runner.failures.checks import check_number
from runner.failures.crash import BATCH, BUNDLE, FACTS, describe_crash
from runner.failures.errors import RankFailed
from runner.failures.facts import facts_of, is_of_environment
from runner.files.names import CONFIG, RECORD, RESULT
from runner.terminal.commands import show_command

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

MAX_CODE = 12_000_000  # bytes of modules
MEGABYTE = 1_000_000
SAVING = (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT)
"""The events at which checkpoints are written; a run resumed from one does not repeat them."""


class CrashBundle(Callback):
    """Writes `crash.zip` into the run's folder if training fails; `runner replay crash.zip` then fails the same way.

    It holds the run's record with the modules that were kept, the newest checkpoint, and the tensors of the batch on
    rank 0, as far as they fit into `max_size`, but no file from outside the run's folder and no environment
    variable. The record has no passwords. If a hook fails at BATCH_CHECKPOINT, EPOCH_CHECKPOINT or
    ITERATION_CHECKPOINT, the file holds an earlier checkpoint, so that the replay reaches this event. No file is
    written for a failure of the machine, nor for an error that shows a wrong config, such as one in a new run's first
    batch, because the command reproduces it. Rank 0 writes the file when the run closes, and logs it as an artifact.
    Place the callback after the one that saves checkpoints.

    Args:
        max_size: maximum size of the file in megabytes, above 0; a checkpoint that does not fit is left out, and the
            replay then starts from the beginning of the run.

    Raises:
        ValueError: `max_size` is not above 0.
    """

    only_in_training = True

    def __init__(self, max_size: float = 500.0) -> None:
        check_number("max_size", max_size, "(0, inf]", "a number of megabytes")
        self.max_size = max_size

    def close(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        error = state.error
        if not isinstance(error, Exception) or get_global_rank() != 0 or not self._is_worth_a_bundle(state, error):
            return
        path = state.run_dir / BUNDLE
        with disk_errors_reported(self.config_key):
            self._write(path, state, error)
            logger.log_artifact(path)
            command = show_command("replay", str(path))
            hint = f"to see it fail again, here or on another machine: {command}"
            if isinstance(error, RankFailed):  # printed as the other rank wrote it, without notes
                log.info(hint)
            else:
                error.add_note(hint)

    def _is_worth_a_bundle(self, state: State, error: Exception) -> bool:
        """Return whether a run with a folder failed, and neither its config nor the machine is to blame."""
        if facts_of(error).refusal or is_of_environment(error):
            return False
        if self.has_trained:
            return (state.run_dir / CONFIG).is_file()
        is_refused = isinstance(error, ValueError | TypeError | OSError | ImportError)
        return bool(state.config) and (state.run_dir / RESULT).is_file() and not is_refused

    def _write(self, path: Path, state: State, error: Exception) -> None:
        from safetensors.torch import save

        trained = state.timestamp.batch
        facts = {**describe_crash(error), "epoch": state.timestamp.epoch, "batch": trained + 1}
        room = self.max_size * MEGABYTE
        partial = path.with_name(f".{path.name}.partial")
        try:
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
                file.writestr(FACTS, json.dumps(facts, indent=1))
                with self._record_folder(state) as record:
                    room -= _add(file, record, _record_files(record), math.inf)
                content = save(dict(_tensors("batch", getattr(state, "batch", None))))
                if len(content) < room / 2:
                    file.writestr(BATCH, content)
                    room -= len(content)
                # A replay from a checkpoint of this very event would skip the event.
                before = trained if facts_of(error).event in SAVING else trained + 1
                _add(file, state.run_dir, _checkpoint_files(state.run_dir, before), room)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @contextmanager
    def _record_folder(self, state: State) -> Iterator[Path]:
        """Yield the folder of the run's record; before training it is a temporary one, written here."""
        if self.has_trained:
            yield state.run_dir
            return
        write_record = resolve_name("runner.records.write:write_record")  # by name: its layer is above this one
        with TemporaryDirectory(prefix="runner-crash-") as folder:
            write_record(Path(folder), state.config, [], {"run_name": state.run_name})
            yield Path(folder)


def _add(file: zipfile.ZipFile, folder: Path, paths: list[Path], room: float) -> int:
    """Add all of some files, or none if they do not fit, and return their size in bytes."""
    size = sum(path.stat().st_size for path in paths)
    if size > room:
        log.warning("%s: %s and %d more files do not fit into max_size", BUNDLE, paths[0].name, len(paths) - 1)
        return 0
    for path in paths:
        compression = zipfile.ZIP_STORED if path.suffix in (".pt", ".safetensors") else None  # weights hardly compress
        file.write(path, path.relative_to(folder).as_posix(), compress_type=compression)
    return size


def _record_files(folder: Path) -> list[Path]:
    modules = (path for path in sorted(folder.glob("code/**/*")) if "__pycache__" not in path.parts)
    code = [path for path in modules if _is_inside(path, folder)]
    if sum(path.stat().st_size for path in code) > MAX_CODE:
        code = []
    return [*(folder / name for name in (*RECORD, DIGESTS) if _is_inside(folder / name, folder)), *code]


def _checkpoint_files(folder: Path, batch: int) -> list[Path]:
    """Return the files of the newest checkpoint before a batch; an empty list without one."""
    from runner.checkpoints.history import checkpoint_before

    root = folder.resolve()
    checkpoint = checkpoint_before(root, batch)
    if checkpoint is None or not checkpoint.is_relative_to(root):
        return []
    return [folder / path.relative_to(root) for path in sorted(checkpoint.iterdir()) if _is_inside(path, root)]


def _is_inside(path: Path, folder: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.resolve().is_relative_to(folder.resolve())


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a batch by name, on the CPU."""
    from runner.device.batch import tensors

    for index, tensor in enumerate(tensors(value)):
        if not (tensor.is_meta or tensor.is_nested or tensor.is_sparse):
            yield f"{name}.{index}", tensor.detach().cpu().contiguous().clone()
