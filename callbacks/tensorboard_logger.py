"""Writes event files for TensorBoard."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination
from runner.callbacks._event_file import EventFile
from runner.failures.checks import check_inner_path
from runner.files.values import InnerPath
from runner.libraries.extras import require

if TYPE_CHECKING:
    from runner import Logger, MetricRecord, State


class TensorBoardLogger(LoggerDestination):
    """Writes metrics, images, tables and parameters for `tensorboard --logdir`; needs the package tensorboard.

    Tables, parameters and captions of images are written as texts. Metrics logged together share one event. Rank 0
    writes. A resumed run adds a file, which hides what was written after the batch that it resumes from.

    Args:
        folder: path of the folder, relative to the run's folder.

    Raises:
        ValueError: `folder` is absolute or leads out of the run's folder.
        ImportError: the package tensorboard or google-crc32c is missing.
    """

    def __init__(self, folder: InnerPath = "tensorboard") -> None:
        check_inner_path("folder", folder, "tensorboard")
        require("TensorBoardLogger", "tensorboard", "tensorboard", "google_crc32c")
        self.folder = folder
        self.path: Path | None = None
        self._first_step = 0
        self._file: EventFile | None = None
        self._opening = threading.Lock()

    def init(self, state: State, logger: Logger) -> None:
        self.path = Path(state.run_dir).resolve() / self.folder

    def after_load(self, state: State, logger: Logger) -> None:
        self._first_step = state.timestamp.batch + 1

    def fit_start(self, state: State, logger: Logger) -> None:
        if state.config:
            self.log_hyperparameters(state.config)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        text = json.dumps(hyperparameters, indent=4, default=str)
        self._log_text("hyperparameters", f"```json\n{text}\n```", 0)

    def log_records(self, records: Sequence[MetricRecord]) -> None:
        self._open().write_metrics(records)

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._log_text(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)

    def log_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None = None) -> None:
        from torch.utils.tensorboard.summary import image

        self._log_summary(image(name, images, dataformats="NHWC"), step)
        if captions is not None:
            self._log_text(f"{name}/captions", "\n".join(f"1. {caption}" for caption in captions), step)

    def close(self, state: State, logger: Logger) -> None:
        if self._file is not None:
            self._file.close()

    def _log_text(self, name: str, content: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text

        self._log_summary(text(name, content), step)

    def _log_summary(self, summary: Any, step: int) -> None:
        self._open().write([{"wall_time": time.time(), "step": step, "summary": summary}])

    def _open(self) -> EventFile:
        """Return the file, creating it on first use, so that a run that never starts leaves no folder."""
        with self._opening:
            if self._file is None:
                assert self.path is not None
                self._file = EventFile(self.path, self._first_step if self._first_step > 1 else None)
            return self._file


def _cell(value: Any) -> str:
    """Return a value as the text of a cell in a Markdown table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
