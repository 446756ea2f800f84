"""Logs runs to Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination
from runner.callbacks._wandb_session import WandbSession
from runner.failures.checks import check_list, check_number, check_one_of
from runner.failures.exits import is_expected_exit
from runner.files.addresses import hidden_everywhere
from runner.files.values import Address
from runner.libraries.extras import require

if TYPE_CHECKING:
    from runner import Logger, MetricRecord, State

MODES = ("offline", "online")


class WandBLogger(LoggerDestination):
    """Logs parameters, metrics, tables, images and artifacts to Weights & Biases; needs the package wandb.

    Offline, nothing leaves the machine, and `wandb sync` can send the folder `wandb` in the run's folder later. wandb
    works on a separate thread, so training neither waits for it nor fails because of it: a failure gives one warning,
    and online it never asks for a key. The x-axis of metrics is `batch`. A resumed run keeps its id, and values of
    retrained batches appear twice; `kill -9` loses data that wandb has not written yet. Files are copied, and wandb
    keeps a copy of tables in `$WANDB_DATA_DIR` until they are sent. A run begins with its first batch; one that ends
    before that leaves nothing. Rank 0 logs.

    Args:
        project: name of the project; None means `$WANDB_PROJECT`, or 'runner' if that is not set.
        name: name of the run in wandb; None takes the run's own name.
        entity: user or team that owns the run; None means wandb's default.
        group: name under which wandb groups runs; None means no group.
        tags: tags of the run.
        mode: 'offline' or 'online'; None means `$WANDB_MODE`, or 'offline' if that is not set.
        close_timeout: seconds to wait at the end for data that wandb has not written or sent yet.

    Raises:
        ValueError: `mode` is neither 'offline' nor 'online', `close_timeout` is not above 0, or `tags` is a string.
        ImportError: the package wandb is missing.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        entity: Address | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
        close_timeout: float = 60.0,
    ) -> None:
        self.mode = os.environ.get("WANDB_MODE") or "offline" if mode is None else mode
        check_one_of("mode", self.mode, MODES)
        check_number("close_timeout", close_timeout, "(0, inf]", "a number of seconds")
        check_list("tags", tags)
        require("WandBLogger", "wandb", "wandb")
        self.project = project or os.environ.get("WANDB_PROJECT") or "runner"
        self._options = {"name": name, "entity": entity, "group": group, "tags": [*tags]}
        self.close_timeout = close_timeout
        self.run_id = uuid.uuid4().hex[:12]
        self._session = WandbSession(self.mode, close_timeout)
        self._run: dict[str, Any] = {}  # arguments of wandb.init
        self._folder = ""

    def init(self, state: State, logger: Logger) -> None:
        self._folder = str(Path(state.run_dir).resolve())

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "run_dir": self._folder}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["run_dir"] == self._folder:  # a fork is a separate run
            self.run_id = state["run_id"]

    def fit_start(self, state: State, logger: Logger) -> None:
        self._run = self._options | {
            "name": self._options["name"] or state.run_name,
            "project": self.project,
            "id": self.run_id,
            "dir": str(Path(state.run_dir).resolve()),
            "config": hidden_everywhere(state.config),
        }
        if state.timestamp.batch > 0:
            self._begin()

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self.fit_start(state, logger)
        self._begin()

    predict_start = eval_standalone_start

    def _begin(self) -> None:
        if self._run:
            self._session.begin(**self._run)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self._session.submit("set_config", hidden_everywhere(hyperparameters))

    def log_tags(self, tags: Mapping[str, str]) -> None:
        self._session.submit("set_config", {"tags": hidden_everywhere(tags)})

    def log_records(self, records: Sequence[MetricRecord]) -> None:
        if any(record.timestamp.batch > 0 for record in records):
            self._begin()
        for record in records:
            self._session.submit("log", record.metrics, record.step)

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        self._session.submit("log_table", [*columns], [[*row] for row in rows], name, step)

    def log_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None = None) -> None:
        self._session.submit("log_images", images, name, step, captions)

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        self._session.submit("save", Path(path).resolve(), name)

    def close(self, state: State, logger: Logger) -> None:
        if state.error is None:
            self._begin()
        interrupted = is_expected_exit(state.error)
        self._session.close(exit_code=0 if state.error is None else 1, in_a_hurry=interrupted)
