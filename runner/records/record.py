"""Reads a run's record, the files that each of its sessions wrote into the run's folder before its first batch.

The newest record is in the run's folder; a resumed run keeps those of earlier sessions in `sessions/1` and so on.
docs/runs.md lists the files. Anyone may have written them, so they have a size limit and nothing in them is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.files.names import CONFIG, ENVIRONMENT, OVERRIDES, PATCH, SESSIONS, SIGNATURE
from runner.files.signing import is_signed
from runner.files.whole import read_bounded, read_object
from runner.records.kept_code import read_code
from runner.records.plain_yaml import load_plain

LARGEST = 1_000_000  # bytes of a config, and of the other files except the patch
LARGEST_PATCH = 16 * LARGEST
MOST_RANKS = 10_000
SIGNED = (CONFIG, OVERRIDES)
"""The files that determine the run; the modules kept with them are signed too."""
VERB = "verb"
"""In the environment: the verb of the session's command."""
OWN_LOOP = "own loop"
"""The verb of a run that `runner.Recorder` recorded: its loop is not this project's."""
RUN_NAME = "run_name"
"""In the environment: the name of the run."""
FROM_CHECKPOINT = "from_checkpoint"
"""In the environment: the checkpoint from which the session began; null at the beginning of a run."""
FROM_BATCH = "from_batch"
"""In the environment: the batch after which the session began."""


@dataclass(frozen=True)
class Record:
    """The record of one session of a run.

    Attributes:
        folder: the run's folder, or the folder of one of its earlier sessions.
    """

    folder: Path

    @classmethod
    def of_batch(cls, run_dir: Path, batch: int) -> Record:
        """Return the record of the session that trained a batch of the current run.

        If a run was resumed from an earlier checkpoint, the batches first trained after that checkpoint no longer
        belong to it.
        """
        records = cls._all(run_dir)
        earlier = [record for record in records if record.began_after < batch]
        return (earlier or records[:1])[-1]

    @classmethod
    def first(cls, run_dir: Path) -> Record:
        """Return the record of a run's first session."""
        return cls._all(run_dir)[0]

    @classmethod
    def _all(cls, run_dir: Path) -> list[Record]:
        """Return the records of a run's sessions, in order; the run's own if none has a config."""
        numbered = [folder for folder in run_dir.glob(f"{SESSIONS}/[0-9]*") if folder.name.isdigit()]
        folders = [*sorted(numbered, key=lambda folder: int(folder.name)), run_dir]
        return [record for record in map(cls, folders) if record.exists] or [cls(run_dir)]

    @property
    def exists(self) -> bool:
        """Whether there is a config."""
        return (self.folder / CONFIG).is_file()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config.

        Raises:
            ValueError: it is missing, damaged, too large, or not a config.
        """
        config = self._read(CONFIG)
        if not isinstance(config, dict):
            raise ValueError(f"{self.folder / CONFIG} is not the record of a run")
        return config

    @property
    def config_if_readable(self) -> dict[str, Any]:
        """The resolved config; empty if it cannot be read."""
        try:
            return self.config
        except (OSError, ValueError):
            return {}

    @cached_property
    def overrides(self) -> list[str]:
        """The overrides and Hydra's options from which the config was composed.

        Raises:
            ValueError: they are damaged, or not a list.
        """
        overrides = self._read(OVERRIDES) or []
        if not isinstance(overrides, list):
            raise ValueError(f"{self.folder / OVERRIDES} is not the record of a run")
        return [*map(str, overrides)]

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """The command, versions, hardware and commit; empty if they cannot be read."""
        return read_object(self.folder / ENVIRONMENT, LARGEST)

    @property
    def verb(self) -> str:
        """The verb of the command that made the run; `train` if it is not recorded."""
        return str(self.environment.get(VERB, "train"))

    @property
    def run_name(self) -> str:
        """The name of the run; empty if it is not recorded."""
        return str(self.environment.get(RUN_NAME, ""))

    @property
    def began_after(self) -> int:
        """The batch after which the session began; 0 if it began the run."""
        batch = self.environment.get(FROM_BATCH)
        return batch if isinstance(batch, int) else 0

    @property
    def ranks(self) -> int | None:
        """The ranks that trained; None if they are not recorded."""
        return self._count("ranks")

    @property
    def threads(self) -> int | None:
        """The CPU threads of each rank; the last bits of numbers depend on them. None if they are not recorded."""
        return self._count("threads")

    def _count(self, name: str) -> int | None:
        count = self.environment.get(name)
        return count if type(count) is int and 0 < count < MOST_RANKS else None

    @cached_property
    def patch(self) -> bytes:
        """The uncommitted changes to the code; empty without any, or if they cannot be read."""
        try:
            return read_bounded(self.folder / PATCH, LARGEST_PATCH)
        except (OSError, ValueError):
            return b""

    @property
    def code(self) -> dict[str, bytes]:
        """The uncommitted modules that the run imported, by path."""
        return read_code(self.folder)

    @cached_property
    def is_own(self) -> bool:
        """Whether this user made the record, and nobody has changed it since."""
        if not all((self.folder / name).is_file() for name in (*SIGNED, SIGNATURE)):  # reading a pipe would hang
            return False
        try:
            signature = (self.folder / SIGNATURE).read_bytes()
            signed = [(self.folder / name).read_bytes() for name in SIGNED]
            return is_signed(signature, [*signed, *signed_code(self.code)])
        except OSError:
            return False

    def _read(self, name: str) -> Any:
        """Return the content of a file; None if there is no such file."""
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            return load_plain(read_bounded(path, LARGEST).decode())
        except ValueError as error:
            raise ValueError(f"its {name} cannot be read: {error}") from error


def forked_after(run_dir: Path) -> int:
    """Return the batch of the parent after which a fork begins, 0 for any other run.

    The batches before it were trained with the parent's config, so a fork cannot be retrained from the start.
    """
    first = Record.first(run_dir)
    return first.began_after if first.verb == "fork" else 0


def signed_code(modules: Mapping[str, bytes]) -> list[bytes]:
    """Return the signed parts of the kept modules: names and contents."""
    return [part for name in sorted(modules) for part in (name.encode(), modules[name])]
