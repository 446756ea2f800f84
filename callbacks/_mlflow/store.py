"""Opens MLflow stores, experiments and runs, so that several processes may do it at once."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlflow.exceptions
import requests
from mlflow import MlflowClient
from mlflow.entities import Experiment, Run

from runner.callbacks._mlflow.delivery import Deleted, explain, run_deleted
from runner.callbacks._mlflow.sink import TAG_LENGTH, shorten
from runner.callbacks._mlflow.spool import is_id
from runner.callbacks._mlflow.target import SQLITE, set_environment
from runner.files.whole import read_object

LOCK_TIMEOUT = 60.0  # seconds

_clients: dict[str, MlflowClient] = {}


@contextmanager
def store_lock(tracking_uri: str) -> Iterator[None]:
    """Keeps other writers from making the same SQLite store at the same time, which breaks its schema migration.

    Raises:
        TimeoutError: another process holds it for a minute.
    """
    if not tracking_uri.startswith(SQLITE):
        yield
        return
    path = Path(tracking_uri.removeprefix(SQLITE) + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_TIMEOUT
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} is held by another process for {LOCK_TIMEOUT:g} s") from None
                time.sleep(0.05)
        yield


def make_store(path: Path) -> None:
    """Make an empty SQLite store aside and put it in place whole, where there is none.

    MLflow makes one in dozens of steps that take seconds; a store that was left between two of them never opens again.
    """
    from mlflow.store.db import utils

    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    engine = utils.create_sqlalchemy_engine(f"{SQLITE}{aside}")
    utils._initialize_tables(engine)
    engine.dispose()
    try:
        os.link(aside, path)
    except FileExistsError:  # made by a server that was started a moment ago: it does not know our lock
        aside.unlink()
    except OSError:  # a file system without hard links
        aside.replace(path)
    else:
        aside.unlink()


def open_early(tracking_uri: str) -> None:
    """Connect to a SQLite store that exists, so that a run that comes later need not wait for it; nothing is written.

    Raises:
        Exception: what MLflow says to it.
    """
    path = Path(tracking_uri.removeprefix(SQLITE))
    if tracking_uri.startswith(SQLITE) and path.is_file():
        with store_lock(tracking_uri):
            client = MlflowClient(tracking_uri=tracking_uri)
            client.search_experiments(max_results=1)
        _clients[tracking_uri] = client


def open_store(uri: str) -> MlflowClient:
    """A client of a store, which is made where it does not exist."""
    with store_lock(uri):
        if uri.startswith(SQLITE) and not (path := Path(uri.removeprefix(SQLITE))).exists():
            make_store(path)
        if uri not in _clients:
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)
            _clients[uri] = client  # only once it has worked
    return _clients[uri]


def open_experiment(client: MlflowClient, order: Mapping[str, Any]) -> str:
    """The id of a run's experiment, which is made where it does not exist.

    Raises:
        Deleted: it was.
    """
    name = order["experiment_name"]
    with store_lock(order["tracking_uri"]):
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            try:
                tags = {"mlflow.experimentKind": "custom_model_development"}  # opens in the view for training
                return client.create_experiment(name, order["artifact_location"], tags)
            except mlflow.exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = client.get_experiment_by_name(name)  # of another machine, a moment ago
                if experiment is None:
                    raise
    refuse_deleted(experiment)
    return experiment.experiment_id


def refuse_deleted(experiment: Experiment) -> None:
    """Raise where nobody would see the runs of an experiment.

    Raises:
        Deleted: it was.
    """
    if experiment.lifecycle_stage == "deleted":
        number = experiment.experiment_id
        restore = f"restore it in the UI (`mlflow experiments restore --experiment-id {number}`)"
        raise Deleted(f"the experiment {experiment.name!r} is deleted there; {restore}, or choose another name")


def open_run(
    order: Mapping[str, Any], run_id: str | None, tags: Callable[[], dict[str, str]], restore: bool
) -> tuple[MlflowClient, Run]:
    """A client, and the run of a spool, made when it does not exist.

    A run that this spool has is found again by its `runner.spool` tag, so that a writer killed right after making it
    leaves no second one.

    Args:
        order: where the run goes.
        run_id: the run's id, when it is known.
        tags: computes the tags of a new run.
        restore: whether one that was deleted is wanted again.

    Raises:
        Deleted: it was, and is not; or its experiment was.
    """
    client = open_store(order["tracking_uri"])
    run = None
    if is_id(run_id):
        try:
            run = client.get_run(run_id)
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    if run is None or run.data.tags.get("runner.spool") != order["spool"]:  # of which somebody else has the id
        experiment_id = open_experiment(client, order)
        found = client.search_runs([experiment_id], f"tags.`runner.spool` = '{order['spool']}'", max_results=1)
        if not found:
            marked = {**tags(), "runner.spool": order["spool"]}
            return client, client.create_run(
                experiment_id,
                start_time=order["start_time"],
                run_name=order["run_name"],
                tags={key: shorten(value, TAG_LENGTH) for key, value in marked.items()},
            )
        run = found[0]
    refuse_deleted(client.get_experiment(run.info.experiment_id))  # which may bear another name by now
    if run.info.lifecycle_stage == "deleted":
        if not restore:
            raise run_deleted(run.info.run_id)
        client.restore_run(run.info.run_id)
    return client, run


def find_run(run_id: str, tracking_uri: str, downloads: Path | None) -> Path | None:
    """Return the folder of a run, or `downloads` with its record in it; None where the store has no such run.

    Args:
        run_id: MLflow's.
        tracking_uri: of the store; a SQLite store that does not exist is not made.
        downloads: see `LoggerDestination.find_run`.

    Raises:
        ValueError: the store cannot be read, the run is deleted, or what is asked of it is not there.
    """
    if tracking_uri.startswith(SQLITE) and not Path(tracking_uri.removeprefix(SQLITE)).exists():
        return None
    set_environment()
    client = MlflowClient(tracking_uri)
    try:
        run = client.get_run(run_id)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise ValueError(f"MLflow: {explain(error, tracking_uri)}") from error
    if run.info.lifecycle_stage == "deleted":
        raise ValueError(f"MLflow run {run_id} is deleted: `mlflow runs restore --run-id {run_id}` brings it back")
    name = run.data.tags.get("runner.run_dir")
    with suppress(OSError):  # the folder may be in somebody else's home
        if name is not None and read_object(Path(name) / "mlflow" / "sent.json").get("run_id") == run_id:
            return Path(name)
    if downloads is None:
        where = f"{name} on {run.data.tags.get('host')}" if name else "unknown"
        raise ValueError(
            f"MLflow run {run_id}: its folder with the checkpoints ({where}) is not here, or may not be read; "
            "give resume= a folder, or make the run again with rerun="
        )
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        if not client.list_artifacts(run_id, "record"):
            raise ValueError(f"MLflow run {run_id} has no record among its artifacts: it cannot be made again")
        for file in Path(client.download_artifacts(run_id, "record", str(downloads))).iterdir():
            file.rename(downloads / file.name)
    except (mlflow.exceptions.MlflowException, requests.RequestException, OSError) as error:
        raise ValueError(f"record of MLflow run {run_id}: {explain(error, tracking_uri)}") from error
    return downloads
