"""Leaves a file from which a failure in training can be had again, on any machine."""

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
from runner.checkpoints.digest import FILE as DIGESTS
from runner.failures.checks import check_number
from runner.failures.crash import BATCH, BUNDLE, FACTS, describe_crash
from runner.failures.errors import RankFailed
from runner.failures.facts import facts_of, is_of_environment
from runner.files.names import CONFIG, RECORD, RESULT
from runner.terminal.commands import show_command

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

MOST_CODE = 12_000_000  # bytes of modules
MEGABYTE = 1_000_000
SAVING = (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT)
"""The events at which checkpoints are written; a run resumed from one does not fire them again."""


class CrashBundle(Callback):
    """Leaves `crash.zip` in the run's folder if training fails: `runner replay crash.zip` fails in the same way.

    It holds the run's record with the modules that were kept, the newest checkpoint, and the tensors of the batch on
    rank 0, as far as they fit into `max_size`; never a file from outside of the run's folder, nor an environment
    variable. The record has no passwords. Of a hook that fails at BATCH_CHECKPOINT, EPOCH_CHECKPOINT or
    ITERATION_CHECKPOINT, it holds an earlier checkpoint, so that the replay comes to this event. A failure of the
    machine leaves none. What shows a config to be wrong, as a failure of a new run's first batch does, leaves none: the
    command shows the same. Rank 0 writes the file when the run closes, and logs it as an artifact. Place the callback
    after the one that saves checkpoints.

    Args:
        max_size: megabytes that the file may have, above 0; a checkpoint that does not fit is left out, and the replay
            then begins with the run.

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
        if not isinstance(error, Exception) or get_global_rank() != 0 or not self._is_of_a_run(state, error):
            return
        path = state.run_dir / BUNDLE
        with disk_errors_reported(self.config_key):
            self._write(path, state, error)
            logger.log_artifact(path)
            command = show_command("replay", str(path))
            hint = f"to see it fail again, here or on another machine: {command}"
            if isinstance(error, RankFailed):  # it is printed as the other rank wrote it
                log.info(hint)
            else:
                error.add_note(hint)

    def _is_of_a_run(self, state: State, error: Exception) -> bool:
        """Return whether a run that has a folder failed, and its config is not refused for that."""
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
                with self._record_of(state) as record:
                    room -= _add(file, record, _record(record), math.inf)
                content = save(dict(_tensors("batch", getattr(state, "batch", None))))
                if len(content) < room / 2:
                    file.writestr(BATCH, content)
                    room -= len(content)
                # After a checkpoint of this exact moment, training would continue from there.
                before = trained if facts_of(error).event in SAVING else trained + 1
                _add(file, state.run_dir, _checkpoint(state.run_dir, before), room)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @contextmanager
    def _record_of(self, state: State) -> Iterator[Path]:
        """Yield the folder of the run's record, which a run that fails before it trains does not have yet."""
        if self.has_trained:
            yield state.run_dir
            return
        write_record = resolve_name("runner.records.record:write_record")  # by name: it lies above
        with TemporaryDirectory(prefix="runner-crash-") as folder:
            write_record(Path(folder), state.config, [], state.run_name)
            yield Path(folder)


def _add(file: zipfile.ZipFile, folder: Path, paths: list[Path], room: float) -> int:
    """Add all of some files, or none if they do not fit, and return their size in bytes."""
    size = sum(one.stat().st_size for one in paths)
    if size > room:
        log.warning("%s: %s and %d more files do not fit into max_size", BUNDLE, paths[0].name, len(paths) - 1)
        return 0
    for one in paths:
        stored = zipfile.ZIP_STORED if one.suffix in (".pt", ".safetensors") else None  # weights hardly shrink
        file.write(one, one.relative_to(folder).as_posix(), compress_type=stored)
    return size


def _record(folder: Path) -> list[Path]:
    modules = (one for one in sorted(folder.glob("code/**/*")) if "__pycache__" not in one.parts)
    code = [one for one in modules if _is_inside(one, folder)]
    if sum(one.stat().st_size for one in code) > MOST_CODE:
        code = []
    return [*(folder / name for name in (*RECORD, DIGESTS) if _is_inside(folder / name, folder)), *code]


def _checkpoint(folder: Path, batch: int) -> list[Path]:
    """Return the files of the newest checkpoint from which a batch can be trained again; none if there is none."""
    from runner.checkpoints.history import checkpoint_before

    found = checkpoint_before(folder.resolve(), batch)
    if found is None or not found.is_relative_to(folder.resolve()):
        return []
    return [
        folder / one.relative_to(folder.resolve())
        for one in sorted(found.iterdir())
        if _is_inside(one, folder.resolve())
    ]


def _is_inside(path: Path, folder: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.resolve().is_relative_to(folder.resolve())


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a batch by name, on the CPU."""
    from runner.device.batch import tensors

    for number, one in enumerate(tensors(value)):
        if not (one.is_meta or one.is_nested or one.is_sparse):
            yield f"{name}.{number}", one.detach().cpu().contiguous().clone()
