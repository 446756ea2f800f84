"""Logs runs to Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination
from runner.addresses import hidden_everywhere
from runner.callbacks._extra import require
from runner.callbacks._wandb_session import Session

if TYPE_CHECKING:
    from runner import Logger, Record, State

MODES = ("offline", "online")


class WandBLogger(LoggerDestination):
    """Parameters, metrics, tables, images and artifacts of a run in Weights & Biases; needs the package wandb.

    Offline, nothing leaves the machine: `wandb sync` sends the folder `wandb` of the run's folder later. Training
    neither waits for wandb nor fails because of it: it works in a thread of its own, what it cannot do is said once,
    and online it never asks for a key. The metrics' x-axis is `batch`. A resumed run keeps its id, and values of
    batches that are trained again are there twice; `kill -9` loses what wandb had not written yet. Files are copied; of
    tables wandb keeps a copy in `$WANDB_DATA_DIR` until it has sent them. A run that is refused before training begins
    leaves nothing. Rank 0 logs.

    Args:
        project: None: `$WANDB_PROJECT`, or else 'runner'.
        name: of the run; None: the run's own.
        entity: user or team; None: wandb's default.
        group: under which wandb shows runs together; None: none.
        tags: of the run.
        mode: 'offline' or 'online'; None: `$WANDB_MODE`, or else 'offline'.
        close_timeout: seconds to wait at the end for what is not written or sent yet.

    Raises:
        ValueError: `mode` is another one, or `close_timeout` not above 0.
        ImportError: the package is missing.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
        close_timeout: float = 60.0,
    ) -> None:
        self.mode = os.environ.get("WANDB_MODE") or "offline" if mode is None else mode
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: must be 'offline', 'online' or None, which is $WANDB_MODE")
        if isinstance(close_timeout, bool) or not isinstance(close_timeout, int | float) or not close_timeout > 0:
            raise ValueError(f"close_timeout={close_timeout!r}: must be a number of seconds above 0")
        if isinstance(tags, str):
            raise ValueError(f"tags={tags!r}: must be a list of names")
        require("WandBLogger", "wandb", "wandb")
        self.project = project or os.environ.get("WANDB_PROJECT") or "runner"
        self._options = {"name": name, "entity": entity, "group": group, "tags": [*tags]}
        self.close_timeout = close_timeout
        self.run_id = uuid.uuid4().hex[:12]
        self._session = Session(self.mode, close_timeout)

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]

    def fit_start(self, state: State, logger: Logger) -> None:
        options = self._options | {"name": self._options["name"] or state.run_name}
        self._session.begin(
            **options,
            project=self.project,
            id=self.run_id,
            dir=str(Path(state.run_dir).resolve()),
            config=hidden_everywhere(state.config),
        )

    eval_standalone_start = predict_start = fit_start

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self._session.do("set_config", hidden_everywhere(hyperparameters))

    def log_tags(self, tags: Mapping[str, str]) -> None:
        self._session.do("set_config", {"tags": hidden_everywhere(tags)})

    def log_records(self, records: Sequence[Record]) -> None:
        for record in records:
            self._session.do("log", record.metrics, record.step)

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        self._session.do("log_table", [*columns], [[*row] for row in rows], name, step)

    def log_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None = None) -> None:
        self._session.do("log_images", images, name, step, captions)

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        self._session.do("save", Path(path).resolve(), name)

    def close(self, state: State, logger: Logger) -> None:
        interrupted = isinstance(state.error, KeyboardInterrupt | SystemExit)
        self._session.close(exit_code=0 if state.error is None else 1, in_a_hurry=interrupted)
