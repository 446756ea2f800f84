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
from mlflow.types import ColSpec, Schema, TensorSpec
from mlflow.types.schema import Map

from runner.callbacks._mlflow.spool import EXAMPLE, IMAGE_MODEL, MODEL, TEXT_MODEL

NAME = "model"  # so that runs:/<run id>/model finds it
DIGEST = "runner.digest"  # tag with the digest of the weights, to recognize a model that is sent again
METRICS_PER_CALL = 1000  # the most that MLflow takes


def log_model(client: MlflowClient, run: Run, entry: Mapping[str, Any], folder: Path) -> LoggedModel:
    """Create a run's model with its files and metrics, unless MLflow already has it, and return it."""
    run_id = run.info.run_id
    tags = {DIGEST: str(entry["digest"]), "weights": str(entry["weights"]), "step": str(entry["s"])}
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}' AND name = '{NAME}'")
    model = next((model for model in models if tags.items() <= model.tags.items()), None)
    if model is not None and model.status == LoggedModelStatus.READY:
        return model
    with tempfile.TemporaryDirectory() as files:
        description = _write_files(Path(files), entry, folder)  # first, so that wrong files leave no model behind
        model = model or _create(client, run, tags, is_text="columns" in entry and not _has_images(entry))
        description.model_id = model.model_id
        description.model_uuid = model.model_id
        description.artifact_path = model.artifact_location
        description.run_id = run_id
        description.save(f"{files}/MLmodel")
        client.log_model_artifacts(model.model_id, files)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, int(entry["s"]))])
    _link_metrics(client, run_id, model.model_id, entry["s"])
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def register(client: MlflowClient, name: str, model: LoggedModel) -> None:
    """Register a model as a version of the registered model `name`, which is created if it does not exist."""
    try:
        client.create_registered_model(name)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"run_id = '{model.source_run_id}'")
    if not any((version.name, version.source) == (name, model.artifact_location) for version in versions):
        # Not models:/<id>, because MLflow would look for that in the store of its environment.
        client.create_model_version(name, model.artifact_location, model.source_run_id, model_id=model.model_id)


def _create(client: MlflowClient, run: Run, tags: dict[str, str], is_text: bool) -> LoggedModel:
    return client.create_logged_model(
        run.info.experiment_id,
        name=NAME,
        source_run_id=run.info.run_id,
        params=client.get_run(run.info.run_id).data.params,
        tags=tags,
        model_type="transformers" if is_text else "torch.export",
    )


def _write_files(files: Path, entry: Mapping[str, Any], folder: Path) -> Model:
    """Write the files of a model, and return its `MLmodel`."""
    if "columns" in entry:
        return _write_served_model(files, entry, folder / (IMAGE_MODEL if _has_images(entry) else TEXT_MODEL))
    return _write_program(files, entry, folder)


def _has_images(entry: Mapping[str, Any]) -> bool:
    return entry.get("input") == "binary"


def _write_served_model(files: Path, entry: Mapping[str, Any], folder: Path) -> Model:
    """Write a text or image model as an MLflow model from code: with a file of the runner instead of a pickle."""
    inputs = Schema([ColSpec(str(entry.get("input", "string")), str(name)) for name in entry["columns"]])
    kinds = [(str(name), Map("double") if kind == "map" else str(kind)) for name, kind in entry["results"]]
    versions = {"torch": str(entry["torch"]).partition("+")[0], **entry["versions"], "mlflow": mlflow.__version__}
    description = Model()
    if _has_images(entry):
        description.add_flavor(
            "pytorch", model_data=f"artifacts/{folder.name}", pytorch_version=str(entry["torch"]), code=None
        )
    pyfunc.save_model(
        str(files),
        python_model=str(Path(__file__).with_name("served_model.py")),
        artifacts={"model": str(folder)},
        mlflow_model=description,
        signature=ModelSignature(inputs, Schema([ColSpec(kind, name) for name, kind in kinds])),
        pip_requirements=[f"{name}=={version}" for name, version in versions.items()],
    )
    return Model.load(str(files))


def _write_program(files: Path, entry: Mapping[str, Any], folder: Path) -> Model:
    """Write the files of `mlflow.pytorch.save_model` with `serialization_format='pt2'`, and return their `MLmodel`."""
    (files / "data").mkdir()
    (files / "data" / MODEL).symlink_to(folder / MODEL)
    description = Model(model_size_bytes=(folder / MODEL).stat().st_size)
    description.add_flavor("pytorch", model_data="data", pytorch_version=str(entry["torch"]), code=None)
    if "inputs" in entry:
        inputs, outputs = (Schema([_spec(entry[key])]) for key in ("inputs", "outputs"))
        description.signature = ModelSignature(inputs, outputs)
        example = np.load(folder / EXAMPLE).tolist()
        names = {"artifact_path": "input_example.json", "serving_input_path": "serving_input_example.json"}
        (files / names["artifact_path"]).write_text(json.dumps(example))
        (files / names["serving_input_path"]).write_text(json.dumps({"inputs": example}))
        description.saved_input_example_info = {**names, "type": "ndarray"}
        pyfunc.add_to_model(
            description,
            loader_module="mlflow.pytorch",
            data="data",
            python_env="python_env.yaml",
            model_config={"device": "cpu"},  # an exported program stays on the device of its export
        )
    torch_version = str(entry["torch"]).partition("+")[0]  # without a suffix such as +cu128, which PyPI lacks
    versions = {"mlflow": mlflow.__version__, "torch": torch_version, "numpy": np.__version__}
    (files / "requirements.txt").write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    (files / "python_env.yaml").write_text(
        f"python: {platform.python_version()}\nbuild_dependencies: [pip]\ndependencies: [-r requirements.txt]\n"
    )
    return description


def _spec(tensor: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(np.dtype(tensor["dtype"]), tuple(tensor["shape"]))


def _link_metrics(client: MlflowClient, run_id: str, model_id: str, step: int) -> None:
    """Link the evaluation metrics of the model's step to the model, each with its data set."""
    run = client.get_run(run_id)
    inputs = run.inputs.dataset_inputs if run.inputs is not None else []
    datasets = {tag.value: entry.dataset for entry in inputs for tag in entry.tags if tag.key == "mlflow.data.context"}
    linked = []
    for key in run.data.metrics:
        kind, _, name = key.partition("/")
        label = name.partition("/")[0]
        if kind not in ("loss", "metrics") or label == "train":
            continue
        dataset = datasets.get(label)
        linked += [
            Metric(
                key,
                metric.value,
                metric.timestamp,
                step,
                model_id=model_id,
                dataset_name=dataset and dataset.name,
                dataset_digest=dataset and dataset.digest,
                run_id=run_id,
            )
            for metric in client.get_metric_history(run_id, key)
            if metric.step == step
        ]
    for start in range(0, len(linked), METRICS_PER_CALL):
        client.log_batch(run_id, metrics=linked[start : start + METRICS_PER_CALL])
