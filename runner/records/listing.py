"""Finds, reads and selects the runs in `outputs/` by their results and configs, without Hydra and torch.

Other people may have made the runs, so their files are read as data: with a size limit, and never executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from runner.files.lock import take_lock
from runner.files.names import CONFIG, RESULT
from runner.files.whole import read_bounded
from runner.records.plain_yaml import load_plain
from runner.records.record import LARGEST, OWN_LOOP, Record
from runner.records.result import Result, read_result
from runner.training.metric_choice import metrics_named

OUTPUTS = "outputs"  # in the working directory: `hydra.run.dir` and `hydra.sweep.dir` make folders in it
RUNS = ("*", "*/*", "sweeps/*/*/*")  # folders in it: runs from Python, runs of commands, jobs of sweeps
LOCK = ".lock"  # in a run's folder, locked while the run trains
SMALL = 16_000  # characters; shorter sections are cached once parsed
_SECTION = re.compile(r"^(\w+):.*\n(?:[ -].*\n)*", re.MULTILINE)
FIELDS = ("status", "name", "folder", "verb", "started", "seconds", "objective", "base", "adapter")
"""Fields to select runs by, in addition to metrics, choices and keys of the config."""


@dataclass(frozen=True)
class SavedFolder:
    """The folder of a run, and its result so far; None if that cannot be read."""

    folder: Path
    result: Result | None

    @property
    def status(self) -> str:
        """The status in lower case, 'cut off' if the run stopped without recording it, or 'unreadable'."""
        if self.result is None:
            return "unreadable"
        if self.result.status == "RUNNING" and not _is_locked(self.folder / LOCK):
            return "cut off"
        return self.result.status.lower()

    @property
    def started(self) -> float:
        """When the run began, or else when its folder last changed, in seconds since 1970."""
        if self.result is not None and self.result.started:
            return self.result.started
        try:
            return self.folder.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def identity(self) -> object:
        """What a run shares only with its copies and links: when it began, in which process; or else its inode."""
        result = self.result
        if result is not None and result.started:
            return result.started, result.pid, result.host
        status = self.folder.stat()
        return status.st_dev, status.st_ino

    @property
    def names(self) -> set[str]:
        """Names to select it by, except keys of its config."""
        known = (self.result.metrics, self.result.choices) if self.result is not None else ()
        return {*FIELDS, *(name for names in known for name in names)}

    @cached_property
    def verb(self) -> str:
        """The verb of the command that made the run; `train` if its record does not say."""
        return Record(self.folder).verb

    @property
    def is_own_loop(self) -> bool:
        """Whether `runner.Recorder` recorded it; its config may have any keys, and its evaluation is unknown."""
        return self.verb == OWN_LOOP

    @property
    def is_baseline(self) -> bool:
        """Whether the run evaluated a model before any training."""
        return self.verb == "eval" and self.setting("trainer.load_path") is None

    def value(self, name: str) -> Any:
        """Return a field, a metric, a choice or a value of the config by its name, or None.

        Args:
            name: name such as 'status', 'eval/loss', 'loss' (of the first evaluator), 'model' or 'optimizer.lr'.
        """
        if self.result is None:
            return {"status": self.status, "folder": str(self.folder), "started": self.started}.get(name)
        if name in ("status", "verb", "started"):
            return getattr(self, name)
        if name == "folder":
            return str(self.folder)
        if name in FIELDS:
            return getattr(self.result, name)
        metrics = self.result.metrics
        if named := metrics_named(name, metrics):
            return metrics[named[0]]
        if name in self.result.choices:
            return self.result.choices[name]
        return self.setting(name)

    def setting(self, key: str) -> Any:
        """Return a value of the config by its full key, or None. Only its section is parsed."""
        section, *parts = key.split(".")
        node = self.section(section)
        for part in parts:
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = node[part]
        return node

    def section(self, name: str) -> Any:
        """Return a top-level value of the config, or None. Callers must not change it."""
        if name not in self._sections:
            self._sections[name] = self._read_section(name)
        return self._sections[name]

    @property
    def sections(self) -> list[str]:
        """The top-level keys of its config."""
        return [*(self._texts or Record(self.folder).config_if_readable)]

    def _read_section(self, name: str) -> Any:
        if self._texts is not None and name not in self._texts:
            return None
        config: Any = None
        if self._texts is not None:
            with suppress(ValueError):  # the section refers to another, or is damaged
                config = _parse(self._texts[name])
        if config is None:
            with suppress(ValueError):
                config = load_plain(self._config)
        return config.get(name) if isinstance(config, Mapping) else None

    @cached_property
    def _sections(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _texts(self) -> dict[str, str] | None:
        """The text of each section; None if the config is not in the form that the runner writes."""
        matches = [*_SECTION.finditer(self._config)]
        texts = {match[1]: match[0] for match in matches}
        is_all = sum(len(text) for text in texts.values()) == len(self._config)
        return texts if is_all and len(texts) == len(matches) else None

    @cached_property
    def _config(self) -> str:
        try:
            return read_bounded(self.folder / CONFIG, LARGEST).decode(errors="replace")
        except (OSError, ValueError):
            return ""


def find_runs(outputs: Path) -> Iterator[SavedFolder]:
    """Yield the runs in a folder of outputs, in arbitrary order."""
    for pattern in RUNS:
        for folder in outputs.glob(pattern):
            if not folder.name.startswith(".") and (folder / RESULT).exists():
                yield SavedFolder(folder, read_result(folder))


def _parse(text: str) -> Any:
    """Return the content of YAML text. Many runs share sections, so equal texts are parsed once."""
    return _parse_once(text) if len(text) <= SMALL else load_plain(text)


@lru_cache(maxsize=4096)
def _parse_once(text: str) -> Any:
    return load_plain(text)


def _is_locked(path: Path) -> bool:
    """Return whether another process has a file locked; True if the file system does not support locks."""
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "r+b", buffering=0) as file:
            return take_lock(file) is not True
    except FileNotFoundError:
        return False
    except OSError:
        return True
