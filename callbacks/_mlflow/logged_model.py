"""Makes an MLflow model from a file that the trainer wrote, without importing torch."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow.exceptions
import numpy as np
from mlflow import MlflowClient, pyfunc
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric, Run
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

from runner.callbacks._mlflow.spool import EXAMPLE, MODEL

NAME = "model"  # so that runs:/<run id>/model finds it
DIGEST = "runner.digest"  # tag with the digest of the weights, by which a model that is sent again is found
METRICS = 1000  # the most in one call


def log_model(client: MlflowClient, run: Run, entry: Mapping[str, Any], folder: Path) -> LoggedModel:
    """Create a run's model with its files and metrics, unless MLflow has it already, and return it."""
    run_id = run.info.run_id
    tags = {DIGEST: str(entry["digest"]), "weights": str(entry["weights"]), "step": str(entry["s"])}
    known = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}' AND name = '{NAME}'")
    model = next((one for one in known if tags.items() <= one.tags.items()), None)
    if model is not None and model.status == LoggedModelStatus.READY:
        return model
    with tempfile.TemporaryDirectory() as made:
        described = _write_files(Path(made), entry, folder)  # first, so that wrong files leave no model behind
        model = model or _create(client, run, tags)
        described.model_id = model.model_id
        described.model_uuid = model.model_id
        described.artifact_path = model.artifact_location
        described.run_id = run_id
        described.save(f"{made}/MLmodel")
        client.log_model_artifacts(model.model_id, made)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, int(entry["s"]))])
    _link_metrics(client, run_id, model.model_id, entry["s"])
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def register(client: MlflowClient, name: str, model: LoggedModel) -> None:
    """Make a model a version of a registered model, which is created if there is none of that name."""
    try:
        client.create_registered_model(name)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"run_id = '{model.source_run_id}'")
    if not any((one.name, one.source) == (name, model.artifact_location) for one in versions):
        # Not models:/<id>, because MLflow would look for that in the store of its environment.
        client.create_model_version(name, model.artifact_location, model.source_run_id, model_id=model.model_id)


def _create(client: MlflowClient, run: Run, tags: dict[str, str]) -> LoggedModel:
    return client.create_logged_model(
        run.info.experiment_id,
        name=NAME,
        source_run_id=run.info.run_id,
        params=client.get_run(run.info.run_id).data.params,
        tags=tags,
        model_type="torch.export",
    )


def _write_files(made: Path, entry: Mapping[str, Any], folder: Path) -> Model:
    """Write the files that `mlflow.pytorch.save_model` with `serialization_format='pt2'` would, but for `MLmodel`."""
    (made / "data").mkdir()
    (made / "data" / MODEL).symlink_to(folder / MODEL)
    described = Model(model_size_bytes=(folder / MODEL).stat().st_size)
    described.add_flavor("pytorch", model_data="data", pytorch_version=str(entry["torch"]), code=None)
    if "inputs" in entry:
        inputs, outputs = (Schema([_spec(entry[key])]) for key in ("inputs", "outputs"))
        described.signature = ModelSignature(inputs, outputs)
        example = np.load(folder / EXAMPLE).tolist()
        files = {"artifact_path": "input_example.json", "serving_input_path": "serving_input_example.json"}
        (made / files["artifact_path"]).write_text(json.dumps(example))
        (made / files["serving_input_path"]).write_text(json.dumps({"inputs": example}))
        described.saved_input_example_info = {**files, "type": "ndarray"}
        pyfunc.add_to_model(
            described,
            loader_module="mlflow.pytorch",
            data="data",
            python_env="python_env.yaml",
            model_config={"device": "cpu"},  # an exported program stays on the device that it was exported on
        )
    torch_version = str(entry["torch"]).partition("+")[0]  # without the name of a build, which PyPI does not have
    versions = {"mlflow": mlflow.__version__, "torch": torch_version, "numpy": np.__version__}
    (made / "requirements.txt").write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    (made / "python_env.yaml").write_text(
        f"python: {platform.python_version()}\nbuild_dependencies: [pip]\ndependencies: [-r requirements.txt]\n"
    )
    return described


def _spec(described: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(np.dtype(described["dtype"]), tuple(described["shape"]))


def _link_metrics(client: MlflowClient, run_id: str, model_id: str, step: int) -> None:
    """Give the model the evaluation metrics of its step, each with the data set that it was measured on."""
    run = client.get_run(run_id)
    inputs = run.inputs.dataset_inputs if run.inputs is not None else []
    data = {tag.value: one.dataset for one in inputs for tag in one.tags if tag.key == "mlflow.data.context"}
    linked = []
    for key in run.data.metrics:
        kind, _, rest = key.partition("/")
        label = rest.partition("/")[0]
        if kind not in ("loss", "metrics") or label == "train":
            continue
        on = data.get(label)
        linked += [
            Metric(
                key,
                one.value,
                one.timestamp,
                step,
                model_id=model_id,
                dataset_name=on and on.name,
                dataset_digest=on and on.digest,
                run_id=run_id,
            )
            for one in client.get_metric_history(run_id, key)
            if one.step == step
        ]
    for start in range(0, len(linked), METRICS):
        client.log_batch(run_id, metrics=linked[start : start + METRICS])
