"""Logs runs to MLflow through a separate process."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination
from runner.callbacks._best_values import BestValues
from runner.callbacks._mlflow.description import (
    describe_beginning,
    describe_config,
    flatten,
    note_command,
    typed_overrides,
)
from runner.callbacks._mlflow.session import Session
from runner.callbacks._mlflow.spool import read_sent
from runner.callbacks._mlflow.target import check_address, resolve_uri, set_environment, ui_command, uri_of_run
from runner.callbacks._mlflow.writer_process import shared_writer
from runner.failures.checks import check_number, check_one_of
from runner.failures.errors import wrong_argument
from runner.files.values import Address
from runner.libraries.extras import require
from runner.training.metric_choice import name_metric

if TYPE_CHECKING:
    from runner import Logger, MetricRecord, State
    from runner.core.destination import SweepSummary


ID_TIMEOUT = 5.0  # seconds to wait for a run's id, which is part of its address


class MLflowLogger(LoggerDestination):
    """Logs parameters, metrics, tables, images, artifacts, data sets and status of a run to MLflow.

    Training neither waits for MLflow nor fails because of it. Everything logged is appended to
    `<run folder>/mlflow/spool.jsonl`. A separate process sends it to MLflow, marks the run FAILED if the trainer is
    killed, and leaves what it could not send to the next run. A run begins with its first batch: one that ends
    before that leaves nothing. A resumed run continues its MLflow run: retrained batches keep their first values, and
    a changed parameter is recorded as a tag `param_changed.<key>`. A sweep has one more run, with a table of its jobs.

    Args:
        tracking_uri: address of a server or a database. None means `$MLFLOW_TRACKING_URI` if it is set, otherwise the
            store of a resumed run, or SQLite in `outputs/mlflow.db` under the working directory, with artifacts next
            to it in `mlartifacts`.
        experiment_name: name of the experiment; None means `$MLFLOW_EXPERIMENT_NAME`, or 'runner' if that is not set.
        run_name: name of the run in MLflow; None takes the run's own name.
        tags: additional tags, by name.
        log_system_metrics: whether MLflow's monitor logs CPU, memory, disk, network and GPUs under `system/`.
        system_metrics_interval: seconds between two samples of system metrics.
        close_timeout: seconds to wait at the end for unsent data.
        max_values_per_second: maximum number of metrics to send per second, on average, for slow stores; None sends
            all. With a limit and n keys so far, a value is sent if n / `max_values_per_second` seconds have passed
            since the last one of its key; the last value of each key is sent at the end of the run. The spool holds
            all values, and system metrics are not counted.
        nested: whether the runs of a sweep's jobs are children of the sweep's run, which the UI then shows collapsed.
        log_model: 'last' or 'best' logs the model with these weights at FIT_END, with signature, input example and the
            metrics of its step; None logs none. 'best' is the best checkpoint of a `CheckpointSaver` with `monitor`.
            `mlflow.pytorch.load_model("runs:/<run id>/model")` loads it without the code of the network. Text models of
            transformers and image classifiers are loaded by `mlflow.pyfunc.load_model`, and take a table of texts or
            image files.
        register_model: name of a registered model; the logged model becomes a new version of it.

    Raises:
        ValueError: `tracking_uri` is not an address that MLflow supports, `close_timeout` is negative,
            `system_metrics_interval` or `max_values_per_second` is not above 0, `log_model` is neither 'last' nor
            'best', `register_model` is given without `log_model`, or, at FIT_START, no callback chooses a best
            checkpoint.
        ImportError: the package orjson is missing.

    Logs:
        best/*: best value so far of each loss and metric of an evaluator, in its unit.
        system/*: system metrics with MLflow's names, in the units that they state; steps are samples.
    """

    def __init__(
        self,
        tracking_uri: Address | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = MappingProxyType({}),
        log_system_metrics: bool = True,
        system_metrics_interval: float = 5.0,
        close_timeout: float = 60.0,
        max_values_per_second: float | None = None,
        nested: bool = False,
        log_model: str | None = None,
        register_model: Address | None = None,
    ) -> None:
        require("MLflowLogger", None, "orjson")
        check_number("close_timeout", close_timeout, "[0, inf]", "a number of seconds")
        check_number("system_metrics_interval", system_metrics_interval, "(0, inf]", "a number of seconds")
        check_number("max_values_per_second", max_values_per_second, "(0, inf)", none="no limit")
        check_one_of("log_model", log_model, (None, "last", "best"))
        if register_model is not None and log_model is None:
            raise wrong_argument("register_model", register_model, "no model is logged; add log_model=last or best")
        if register_model is not None and (not register_model.strip() or re.search("[/:]", register_model)):
            raise wrong_argument("register_model", register_model, "must be a name without '/' and ':'")
        self.tracking_uri = resolve_uri(tracking_uri)
        check_address(self.tracking_uri)
        self._by_key = tracking_uri is not None
        self.experiment_name = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "runner"
        self._run_name = run_name
        self._tags = {str(key): str(value) for key, value in (tags or {}).items()}
        self._system_metrics_interval = system_metrics_interval if log_system_metrics else None
        self._close_timeout = close_timeout
        self._max_values_per_second = max_values_per_second
        self._nested = nested
        self._log_model = log_model
        self._register_model = register_model
        self._best = BestValues()
        self._state: State | None = None
        self._session: Session | None = None

    @classmethod
    def warm_up(cls) -> None:
        """Start the process that imports MLflow, which takes a second or two. Without a run it leaves no trace."""
        shared_writer()

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run, or None until it is known, which takes a second or more."""
        return self._session and self._session.run_id

    @property
    def ui_command(self) -> str:
        """The command that opens the MLflow UI, or the run's address on its server, without the password."""
        if self._session is not None and self.tracking_uri.startswith("http"):
            self._session.wait_for_id(min(ID_TIMEOUT, self._close_timeout))
        return ui_command(self.tracking_uri, self._session and self._session.experiment_id, self.run_id)

    def init(self, state: State, logger: Logger) -> None:
        self._state = state
        self._described = False
        run_dir = Path(state.run_dir).resolve()
        self._session = self._open(run_dir, self._run_name or state.run_name, self._system_metrics_interval)
        tags = {"runner.run_dir": str(run_dir)}  # lets `runner resume <id>` find the folder
        if self._nested and (parent := read_sent(run_dir.parent / "mlflow", self.tracking_uri).run_id):
            tags["mlflow.parentRunId"] = parent  # the run of the job's sweep, if it exists
        self._append({"tags": tags | self._tags})
        self._append({"params": describe_config(state.config)})

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._log_model is not None:
            from runner.callbacks._mlflow.model_file import check_loggable

            check_loggable(state, self._log_model)
        if state.timestamp.batch > 0:
            self._begin(state, logger)
        if not self._described:
            self._described = True
            self._append(*describe_beginning(state))

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._log_model is None:
            return
        from runner.callbacks._mlflow.model_file import write_model

        logger.flush()  # the model comes after the metrics of its step, which it is linked to
        entry = write_model(state, Path(state.run_dir).resolve(), self._log_model)
        if entry is not None:
            self._append({**entry, "register": self._register_model})

    def _open(self, folder: Path, name: str, interval: float | None) -> Session:
        self.tracking_uri = uri_of_run(self.tracking_uri, folder)
        target = {"tracking_uri": self.tracking_uri, "experiment_name": self.experiment_name, "run_name": name}
        target |= {"system_metrics_interval": interval, "max_values_per_second": self._max_values_per_second}
        return Session(folder, **target, by_key=self._by_key)

    def _append(self, *entries: dict[str, Any]) -> None:
        if self._session is not None:
            self._session.append(*entries)

    def _begin(self, state: State, logger: Logger) -> None:
        if self._session is not None:
            self._session.begin()

    eval_batch_end = predict_batch_end = _begin  # a config refused in the first batch leaves no run

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self._append({"params": flatten(hyperparameters)})

    def log_tags(self, tags: Mapping[str, str]) -> None:
        self._append({"tags": dict(tags)})

    def log_records(self, records: Sequence[MetricRecord]) -> None:
        if self._session is not None:
            if any(record.timestamp.batch > 0 for record in records):
                self._session.begin()
            values = []
            for record in records:
                values.append((record.metrics, record.step, record.wall_time))
                if best := self._improved(record.metrics):
                    values.append((best, record.step, record.wall_time))
            self._session.append_metrics(values)

    def _improved(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the new best values by their key `best/...`, without per-class values."""
        improved: dict[str, float] = {}
        if self._best.other_keys.issuperset(metrics):  # true after most batches
            return improved
        for key, value in metrics.items():
            if self._state is not None and self._best.add(key, value, self._state):
                label, name = name_metric(key)
                if "/" not in name.removeprefix("loss/"):
                    improved[f"best/{label}/{name}"] = value
        return improved

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        self._append({"table": name, "columns": list(columns), "rows": [list(row) for row in rows]})

    def log_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None = None) -> None:
        if self._session is not None:
            self._session.append_images(images, name, step, captions)

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        if self._session is not None:
            self._session.append_artifact(Path(path), name)

    def log_sweep(self, summary: SweepSummary) -> None:
        """Log the summary of a sweep as a separate run; rerunning the sweep continues that run.

        Before the first job, the status is RUNNING, and the run is created only if the jobs are nested in it.
        """
        session = self._session = self._session or self._open(summary.folder, summary.name, None)
        if summary.status == "RUNNING":
            if self._nested:
                session.begin()
                session.wait_for_id(self._close_timeout)
            return
        session.begin()
        tags = {"runner.sweep": summary.sweep, "runner.sweep_summary": "true"}
        tags |= {f"best.{key}": value for key, value in summary.best.items()}
        self._append({"tags": tags}, {"params": typed_overrides()}, {"note": note_command()})
        for name, (columns, rows) in summary.tables.items():
            self.log_table(columns, rows, name, step=0)
        for path in summary.files:
            session.append_artifact(path, "sweep")
        # The number of finished jobs serves as the step, because it never decreases when a sweep is rerun.
        session.append_metrics([(dict(summary.metrics), int(summary.metrics["sweep/finished"]), time.time())])
        session.finish(summary.status)
        session.wait(self._close_timeout)

    def find_run(self, run_id: str, downloads: Path | None) -> Path | None:
        set_environment()  # before MLflow is imported
        from runner.callbacks._mlflow.store import find_run

        return find_run(run_id, self.tracking_uri, downloads)

    def sync(self, run_dir: Path | None) -> bool:
        from runner.callbacks._mlflow.senders import sync

        fields = {"tracking_uri": self.tracking_uri, "by_key": self._by_key, "experiment_name": self.experiment_name}
        return sync(fields, run_dir)

    def state_dict(self) -> dict[str, Any]:
        if self._session is None or self._state is None:
            return {}
        return {**self._session.state_dict(self._state.timestamp.batch), "best": self._best.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best.load_state_dict(state.get("best", {}))
        if self._session is not None:
            self._session.load_state_dict(state)

    def close(self, state: State, logger: Logger) -> None:
        if self._session is not None:
            self._session.end(state.error)

    def post_close(self) -> None:
        if self._session is not None:  # by now the results are on the console
            self._session.wait(self._close_timeout)
