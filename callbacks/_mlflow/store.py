"""Opens MLflow stores, experiments and runs, safely from several processes. Finds runs by id."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlflow.exceptions
import requests
from mlflow import MlflowClient
from mlflow.entities import Experiment, Run

from runner.callbacks._mlflow.description import origin_tags
from runner.callbacks._mlflow.spool import is_id
from runner.callbacks._mlflow.target import address_for_mlflow, artifact_location, database_of, sqlite_uri
from runner.failures.errors import Deleted
from runner.files.lock import lock_file
from runner.files.whole import read_object
from runner.libraries.mlflow_failures import explain
from runner.terminal.text import shortened

LOCK_TIMEOUT = 60.0  # seconds
TAG_LENGTH = 8000

_clients: dict[str, MlflowClient] = {}
_creating = threading.Lock()  # a file lock does not exclude other threads of the process


def _create_missing_store(database: Path) -> None:
    """Create an empty SQLite store under another name and rename it, unless one exists already.

    MLflow creates a store in dozens of steps, which take seconds. A half-created store can never be opened again, and
    two processes that create the same store at the same time break it.
    """
    from mlflow.store.db import utils

    database.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_file(database.with_name(f"{database.name}.lock"), LOCK_TIMEOUT, 0o666)
    if lock is None:
        raise TimeoutError(f"{database}.lock is held by another process for {LOCK_TIMEOUT:g} s")
    with lock:
        temporary = database.with_name(f".{database.name}.new")
        for suffix in ("", "-journal", "-wal", "-shm"):  # left by a process that was killed here
            temporary.with_name(temporary.name + suffix).unlink(missing_ok=True)
        if database.exists():
            return
        engine = utils.create_sqlalchemy_engine(sqlite_uri(temporary))
        utils._initialize_tables(engine)
        engine.dispose()
        try:
            os.link(temporary, database)
        except FileExistsError:  # created in the meantime by a server, which does not use our lock
            temporary.unlink()
        except OSError:  # the file system has no hard links
            temporary.replace(database)
        else:
            temporary.unlink()


def _get_run(client: MlflowClient, run_id: str) -> Run | None:
    """Return the run with this id, or None if the store does not have it."""
    try:
        return client.get_run(run_id)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def open_early(tracking_uri: str) -> None:
    """Connect to an existing SQLite store before the first run needs it. Nothing is written.

    Raises:
        Exception: MLflow cannot open the store.
    """
    database = database_of(tracking_uri)
    if database is not None and database.is_file():
        open_store(tracking_uri)


def open_store(uri: str) -> MlflowClient:
    """Return a client for a store, which is created if it does not exist.

    Raises:
        TimeoutError: another process has spent a minute creating the store.
    """
    database = database_of(uri)
    if database is not None and (uri not in _clients or not database.exists()):
        with _creating:
            _create_missing_store(database)
    if uri not in _clients:
        client = MlflowClient(address_for_mlflow(uri))
        client.search_experiments(max_results=1)
        _clients[uri] = client  # only after the first call has succeeded
    return _clients[uri]


def open_experiment(client: MlflowClient, target: Mapping[str, Any]) -> str:
    """Return the id of a run's experiment, which is created if it does not exist.

    Raises:
        Deleted: the experiment was deleted.
    """
    name = target["experiment_name"]
    kind = {"mlflow.experimentKind": "custom_model_development"}  # lets the UI open the view for training
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location(target["tracking_uri"]), kind)
        except mlflow.exceptions.MlflowException as error:
            experiment = client.get_experiment_by_name(name)  # created in the meantime by another process
            if experiment is None or error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    refuse_deleted(experiment)
    for key, value in kind.items():
        if key not in experiment.tags:  # keep a kind that the user chose
            client.set_experiment_tag(experiment.experiment_id, key, value)
    return experiment.experiment_id


def open_run(target: Mapping[str, Any], run_id: str | None, run_dir: Path, restore: bool) -> tuple[MlflowClient, Run]:
    """Return a client and the run of a spool, which is created if it does not exist.

    An existing run is found by its `runner.spool` tag, so that no second run is created after a writer was killed right
    after creating the first. With `restore`, a deleted run is restored.

    Raises:
        Deleted: the run was deleted and `restore` is off, or its experiment was deleted.
    """
    client = open_store(target["tracking_uri"])
    run = _get_run(client, run_id) if is_id(run_id) else None
    if run is None or run.data.tags.get("runner.spool") != target["spool"]:  # the id may be from someone else's file
        experiment_id = open_experiment(client, target)
        runs = client.search_runs([experiment_id], f"tags.`runner.spool` = '{target['spool']}'", max_results=1)
        if not runs:
            tags = {**origin_tags(target["command"], target["cwd"], run_dir), "runner.spool": target["spool"]}
            return client, client.create_run(
                experiment_id,
                start_time=target["start_time"],
                run_name=target["run_name"],
                tags={key: shortened(value, TAG_LENGTH) for key, value in tags.items()},
            )
        run = runs[0]
    refuse_deleted(client.get_experiment(run.info.experiment_id))  # not the one in `target`, if it was renamed
    if not restore:
        refuse_deleted(run)
    elif run.info.lifecycle_stage == "deleted":
        client.restore_run(run.info.run_id)
    return client, run


def refuse_deleted(entity: Experiment | Run) -> None:
    """Check that an experiment or a run is not deleted. The runs of a deleted experiment are deleted with it.

    Raises:
        Deleted: the experiment or run was deleted.
    """
    if isinstance(entity, Run):
        if entity.info.lifecycle_stage == "deleted":
            raise Deleted(f"the run {entity.info.run_id} is deleted there; restore it in the UI, or use runner resume")
    elif entity.lifecycle_stage == "deleted":
        restore = f"`mlflow experiments restore --experiment-id {entity.experiment_id}`"
        raise Deleted(f"the experiment {entity.name!r} is deleted there; restore it in the UI ({restore})")


def find_run(run_id: str, tracking_uri: str, downloads: Path | None) -> Path | None:
    """Return the folder of a run, or `downloads` with the run's record in it; None if the store has no such run.

    A missing SQLite store is not created.
    """
    if (database := database_of(tracking_uri)) is not None and not database.exists():
        return None
    client = MlflowClient(address_for_mlflow(tracking_uri))
    try:
        run = _get_run(client, run_id)
    except mlflow.exceptions.MlflowException as error:
        raise ValueError(f"MLflow: {explain(error, tracking_uri)}") from error
    if run is None:
        return None
    if run.info.lifecycle_stage == "deleted":
        raise ValueError(f"MLflow run {run_id} is deleted: `mlflow runs restore --run-id {run_id}` brings it back")
    name = run.data.tags.get("runner.run_dir")
    with suppress(OSError):  # the folder may be in another user's home
        if name is not None and read_object(Path(name) / "mlflow" / "sent.json").get("run_id") == run_id:
            return Path(name)
    if downloads is None:
        location = f"{name} on {run.data.tags.get('host')}" if name else "unknown"
        raise ValueError(
            f"MLflow run {run_id}: its folder with the checkpoints ({location}) is missing or not readable; "
            f"give a folder, or repeat the run with runner rerun {run_id}"
        )
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        if not client.list_artifacts(run_id, "record"):
            raise ValueError(f"MLflow run {run_id} cannot be rerun: its artifacts contain no record")
        for file in Path(client.download_artifacts(run_id, "record", str(downloads))).iterdir():
            file.rename(downloads / file.name)
    except (mlflow.exceptions.MlflowException, requests.RequestException, OSError) as error:
        raise ValueError(f"record of MLflow run {run_id}: {explain(error, tracking_uri)}") from error
    return downloads
