"""Sends the entries of a spool to a run of MLflow, within its limits."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import mlflow.exceptions
import requests
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, Metric, Param, Run, RunTag
from mlflow.store.artifact.artifact_repo import verify_artifact_path

from runner.callbacks._mlflow.failures import Deleted
from runner.callbacks._mlflow.spool import FILES, IMAGES, is_id
from runner.callbacks._mlflow.view import SHARED_VIEW, add_to_view
from runner.terminal.text import shortened

if TYPE_CHECKING:
    from PIL.Image import Image

METRICS_PER_CALL = 1000
PAIRS_PER_CALL = 100  # parameters or tags
KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
DATASET_NAME_LENGTH = 500
NOTE = "mlflow.note.content"  # tag with the description that the UI shows
PICTURES = ("plots", "sweep")  # folders of artifacts whose pictures the description links to
PREVIEW = 256  # pixels of the longer side of the preview that the UI shows first
CAPTION_WIDTH = 160  # pixels; about the width in MLflow's grid, and a dozen words fit
LINE_HEIGHT = 14
LINE_LENGTH = 26  # characters of the default font in CAPTION_WIDTH


def clean_key(key: str, foreign: str = r"[^/\w.\- :]") -> str:
    """Return a key that MLflow accepts, with `_` for foreign characters and a hash that keeps keys distinct.

    The hash depends only on the key, so that a resumed run uses the same one.
    """
    parts = re.sub(foreign, "_", key).split("/")
    cleaned = "/".join("__" if part == ".." else part for part in parts if part not in ("", ".")) or "_"
    if cleaned == key and len(key) <= KEY_LENGTH:
        return key
    return f"{cleaned[: KEY_LENGTH - 9]}_{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"


def clean_path(name: str) -> str:
    """Return a name that MLflow accepts for images and tables."""
    return clean_key(name, r"[^/\w.\- ]")


def checked_path(path: str) -> str:
    """Return a path within a run's artifacts after checking it."""
    try:
        verify_artifact_path(path)
    except mlflow.exceptions.MlflowException as error:
        raise ValueError(error.message) from error
    return path


class RunSink:
    """Sends the entries of a spool to one run.

    SQL stores identify a metric by (key, time, step, value), so one that is sent twice is stored once. A store without
    such a key may hold the metrics of one call twice if the writer was killed during that call. `refused` is called
    with a message about an entry that MLflow will never accept and that is left out, `renamed` with one about a name
    that it does not accept. Files outside of the run's folder are never read, sent or removed.
    """

    def __init__(
        self,
        client: MlflowClient,
        run: Run,
        refused: Callable[[str], None],
        renamed: Callable[[str], None],
        run_dir: Path,
    ) -> None:
        self.run = run
        self.run_id = run.info.run_id
        self._client = client
        self._refused = refused
        self._renamed = renamed
        self._keys: dict[tuple[str, Callable[[str], str]], str] = {}
        self._run_dir = run_dir.resolve()
        self._params = dict(run.data.params)
        self._tables: list[dict[str, str]] = json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]"))
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "start": self._start,
            "params": self._log_params,
            "tags": self._log_tags,
            "note": self._log_note,
            "view": lambda entry: add_to_view(client, run.info.experiment_id, entry["view"]),
            "model": self._log_model,
            "artifact": self._log_artifact,
            "text": lambda entry: client.log_text(self.run_id, entry["text"], checked_path(entry["file"])),
            "table": self._log_table,
            "images": self._log_images,
            "input": self._log_input,
            "status": self._end,
        }

    def send_metrics(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Send metrics in as few calls as MLflow allows."""
        metrics = [Metric(self._key(k), v, entry["t"], entry["s"]) for entry in entries for k, v in entry["m"].items()]
        for start in range(0, len(metrics), METRICS_PER_CALL):
            batch = metrics[start : start + METRICS_PER_CALL]
            try:
                self._client.log_batch(self.run_id, metrics=batch)
            except Exception as error:
                if not self._is_final(error):
                    raise
                for metric in batch:
                    self._attempt(
                        f"metric {metric.key!r}", lambda one=metric: self._client.log_batch(self.run_id, [one])
                    )

    def send(self, entry: dict[str, Any]) -> None:
        """Send an entry that is not a metric.

        Raises:
            Exception: the store cannot be reached or written.
        """
        kind = next((kind for kind in self._handlers if kind in entry), None)
        if kind is None:
            self._refused(f"an entry of unknown kind {[*entry]} was left out")
        else:
            self._attempt(kind, lambda: self._handlers[kind](entry))

    def _key(self, name: str, clean: Callable[[str], str] = clean_key) -> str:
        """Return the name to use in MLflow, reporting it if it differs from the given one."""
        key = self._keys.get((name, clean))
        if key is None:
            key = self._keys[name, clean] = clean(name)
            if key != name:
                self._renamed(f"{name!r} is not a valid name there: it is logged as {key!r}")
        return key

    def _attempt(self, what: str, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:
            if not self._is_final(error):
                raise
            self._refused(f"{what} was left out: {error}")

    def _is_final(self, error: Exception) -> bool:
        """Return whether MLflow will never accept the data, which is not so for a deleted run that may be restored.

        Raises:
            Deleted: the run or its experiment was deleted.
        """
        if not is_refusal(error):
            return False
        refuse_deleted(self._client.get_experiment(self.run.info.experiment_id))
        refuse_deleted(self._client.get_run(self.run_id))
        return True

    def _start(self, entry: dict[str, Any]) -> None:
        self._client.update_run(self.run_id, status="RUNNING")

    def _end(self, entry: dict[str, Any]) -> None:
        if entry["status"] not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError(f"status={entry['status']!r}: must be FINISHED, FAILED or KILLED")
        self._client.set_terminated(self.run_id, entry["status"], entry["t"])

    def _log_params(self, entry: dict[str, Any]) -> None:
        new: dict[str, str] = {}
        changed: dict[str, str] = {}
        for key, value in entry["params"].items():
            key = self._key(key)
            value = shortened(value, PARAM_LENGTH)
            is_late = entry.get("resumed") and key not in self._params
            if not is_late and self._params.setdefault(key, value) == value:
                new[key] = value
            else:  # parameters are immutable in MLflow, and one that is added later was not true from the beginning
                changed[f"param_changed.{key}"] = value
        pairs = [Param(key, value) for key, value in new.items()]
        for start in range(0, len(pairs), PAIRS_PER_CALL):
            self._client.log_batch(self.run_id, params=pairs[start : start + PAIRS_PER_CALL])
        if changed:
            self._log_tags({"tags": changed})

    def _log_tags(self, entry: dict[str, Any]) -> None:
        tags = [RunTag(self._key(key), shortened(value, TAG_LENGTH)) for key, value in entry["tags"].items()]
        for start in range(0, len(tags), PAIRS_PER_CALL):
            self._client.log_batch(self.run_id, tags=tags[start : start + PAIRS_PER_CALL])

    def _log_note(self, entry: dict[str, Any]) -> None:
        """Describe the run, unless it has a description: someone may have edited it in the UI."""
        if NOTE not in self.run.data.tags:
            runs = f"[All runs and their results](#/experiments/{self.run.info.experiment_id}/runs?{SHARED_VIEW})"
            self._log_tags({"tags": {NOTE: f"{entry['note']}\n\n{runs}"}})

    def _link_in_note(self, path: str) -> None:
        """Add a link to an artifact of the run, a picture, to its description, which would be too small for it."""
        note = self._client.get_run(self.run_id).data.tags.get(NOTE, "")
        page = f"#/experiments/{self.run.info.experiment_id}/runs/{self.run_id}/artifacts/{quote(path)}"
        link = f"[{Path(path).stem.replace('_', ' ').capitalize()}]({page})"
        if link not in note and len(note) + len(link) < TAG_LENGTH:
            self._client.set_tag(self.run_id, NOTE, f"{note}\n\n{link}".lstrip())

    def _log_model(self, entry: dict[str, Any]) -> None:
        from runner.callbacks._mlflow.logged_model import log_model, register

        if not is_id(entry["model"]):
            raise ValueError(f"model={entry['model']!r}: must be the name of a folder in {FILES}")
        folder = self._own_file(f"mlflow/{FILES}/{entry['model']}")
        model = log_model(self._client, self.run, entry, folder)
        if entry.get("register"):
            register(self._client, str(entry["register"]), model)
        shutil.rmtree(folder, ignore_errors=True)

    def _log_table(self, entry: dict[str, Any]) -> None:
        file = f"tables/{self._key(entry['table'], clean_path)}.json"
        # Not log_table, which appends to an earlier table and imports pandas.
        rows = [[_to_cell(value) for value in row] for row in entry["rows"]]
        self._client.log_text(self.run_id, json.dumps({"columns": entry["columns"], "data": rows}), file)
        if {"path": file, "type": "table"} not in self._tables:
            self._tables.append({"path": file, "type": "table"})
            self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps(self._tables))

    def _log_artifact(self, entry: dict[str, Any]) -> None:
        path = self._own_file(entry["artifact"])
        self._client.log_artifact(self.run_id, str(path), entry["folder"] and checked_path(entry["folder"]))
        if entry["folder"] in PICTURES and path.suffix == ".png":
            self._link_in_note(f"{entry['folder']}/{path.name}")
        if path.is_relative_to(copies := self._run_dir / "mlflow" / FILES):
            shutil.rmtree(copies / path.relative_to(copies).parts[0], ignore_errors=True)

    def _own_file(self, name: str) -> Path:
        """Return a file or folder within the run's folder; checked, because someone else may have made the spool."""
        path = self._run_dir / name
        for one in chain((path,), path.rglob("*")):  # check the path itself before walking it
            if not one.resolve().is_relative_to(self._run_dir) or ".." in one.parts:
                raise ValueError(f"{one} is not in the run's folder {self._run_dir}")
            if one.exists() and not (one.is_file() or one.is_dir()):
                raise ValueError(f"{one} is neither a file nor a folder")
        return path

    def _log_images(self, entry: dict[str, Any]) -> None:
        file = self._own_file(f"mlflow/{IMAGES}/{Path(entry['file']).name}")
        images = read_images(file, entry["captions"])
        with tempfile.TemporaryDirectory() as folder:
            for index, image in enumerate(images):
                key = self._key(entry["images"], clean_path) + (f"/{index:02d}" if len(images) > 1 else "")
                save_image(image, Path(folder), key, entry["s"], entry["t"], f"{file.stem}-{index}")
            self._client.log_artifacts(self.run_id, folder, "images")
        self._client.set_tag(self.run_id, "mlflow.loggedImages", "True")
        file.unlink(missing_ok=True)

    def _log_input(self, entry: dict[str, Any]) -> None:
        described = entry["input"]
        dataset = Dataset(
            name=shortened(described["name"], DATASET_NAME_LENGTH),
            digest=described["digest"],
            source_type="code",
            source=json.dumps({"tags": described["source"]}),
            schema=json.dumps(described["schema"]) if "schema" in described else None,
            profile=json.dumps(described["profile"]),
        )
        context = InputTag("mlflow.data.context", described["context"])
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, [context])])


def refuse_deleted(entity: Experiment | Run) -> None:
    """Check that an experiment or a run is not deleted. The runs of a deleted experiment are deleted with it.

    Raises:
        Deleted: it was deleted.
    """
    if isinstance(entity, Run):
        if entity.info.lifecycle_stage == "deleted":
            raise Deleted(
                f"the run {entity.info.run_id} is deleted there; restore it in the UI, or continue it with resume="
            )
    elif entity.lifecycle_stage == "deleted":
        restore = f"`mlflow experiments restore --experiment-id {entity.experiment_id}`"
        raise Deleted(f"the experiment {entity.name!r} is deleted there; restore it in the UI ({restore})")


def _to_cell(value: Any) -> Any:
    """Return a value for a table, as text if JSON cannot represent it, because the UI could not read the table."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_refusal(error: Exception) -> bool:
    """Return whether an error means that MLflow was reached and will never accept the data."""
    if isinstance(error, mlflow.exceptions.MlflowException):
        return error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
    if isinstance(error, requests.HTTPError):  # from an artifact store
        return error.response is not None and error.response.status_code in (400, 413, 422)
    if isinstance(error, requests.RequestException):  # before ValueError, which some of these are
        return False
    # Raised for an entry whose structure is not the trainer's.
    return isinstance(error, ValueError | TypeError | LookupError | AttributeError | FileNotFoundError)


def read_images(path: Path, captions: Sequence[str] | None) -> list[Image]:
    """Return the images in an array file (N, H, W, C), C 1 or 3, uint8, with their captions drawn beneath them."""
    import numpy as np
    from PIL.Image import fromarray

    images = [fromarray(array[..., 0] if array.shape[-1] == 1 else array) for array in np.load(path)]
    if captions is None:
        return images
    return [add_caption(image, caption) for image, caption in zip(images, captions, strict=True)]


def save_image(image: Image, folder: Path, key: str, step: int, time_ms: int, identity: str) -> None:
    """Save an image and its preview under names from which MLflow's UI reads the key, step and time.

    MLflow's `log_image` makes a new name at each call, so that an image sent again would appear twice. The time is in
    milliseconds since 1970; `identity` is unique, and stays the same when the image is sent again.
    """
    stem = f"{key.replace('/', '~')}+step+{step}+timestamp+{time_ms}+{identity}"
    image.save(folder / f"{stem}.png")
    preview = image.copy()
    preview.thumbnail((PREVIEW, PREVIEW))
    preview.save(folder / f"{stem}+compressed.webp")


def add_caption(image: Image, caption: str) -> Image:
    """Return the image with its caption beneath, enlarged by a whole factor so that the text fits."""
    from PIL import ImageDraw
    from PIL.Image import Resampling, new

    factor = max(1, -(-CAPTION_WIDTH // image.width))
    image = image.convert("RGB").resize((image.width * factor, image.height * factor), Resampling.NEAREST)
    lines = textwrap.wrap(caption, LINE_LENGTH)
    canvas = new("RGB", (image.width, image.height + LINE_HEIGHT * len(lines) + 4), "white")
    canvas.paste(image)
    ImageDraw.Draw(canvas).multiline_text((2, image.height + 2), "\n".join(lines), fill="black")
    return canvas
