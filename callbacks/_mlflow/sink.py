"""Sends the entries of a spool to an MLflow run, within MLflow's limits."""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import mlflow.exceptions
import requests
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.store.artifact.artifact_repo import verify_artifact_path

from runner.callbacks._mlflow.spool import FILES, IMAGES, METRICS_PER_CALL, is_id, now_ms
from runner.callbacks._mlflow.store import TAG_LENGTH, refuse_deleted
from runner.failures.errors import wrong_argument
from runner.libraries.mlflow_rows import log_metrics
from runner.terminal.text import shortened

if TYPE_CHECKING:
    from PIL.Image import Image

PAIRS_PER_CALL = 100  # parameters or tags
KEY_LENGTH = 250
PARAM_LENGTH = 6000
DATASET_NAME_LENGTH = 500
NOTE = "mlflow.note.content"  # tag with the description that the UI shows
VIEW = "mlflow.sharedViewState.runner"  # tag of an experiment with a view, which the UI offers under Views
SHARED_VIEW = "viewStateShareKey=runner"  # query of a link that opens it
VIEW_COLUMNS = 20  # at most
VIEW_COLUMN_LENGTH = 120  # characters, because a tag of an experiment is limited to 5000
PICTURES = ("plots", "sweep")  # folders of artifacts whose pictures the description links to
PREVIEW = 256  # pixels of the longer side of the preview that the UI shows first
CAPTION_WIDTH = 160  # pixels; about the width of an image in MLflow's grid
LINE_HEIGHT = 14
LINE_LENGTH = 26  # characters in the default font that fit in `CAPTION_WIDTH`
NAMES = r"[^/\w.\- :]"  # characters that MLflow does not accept in names
PATHS = r"[^/\w.\- ]"  # characters that MLflow does not accept in names of images and tables


def artifact_path(path: str) -> str | None:
    """Return a path in a run's artifacts in the form that MLflow accepts; None for the top folder.

    Raises:
        ValueError: the path leads out of the artifacts.
    """
    path = posixpath.normpath(path)
    if path == ".":
        return None
    try:
        verify_artifact_path(path)
    except mlflow.exceptions.MlflowException as error:
        raise ValueError(error.message) from error
    return path


class RunSink:
    """Sends the entries of a spool to a run.

    SQL stores identify a metric by (key, time, step, value), so a metric that is sent twice is stored once. In a store
    without such a key, the metrics of a call may appear twice if the writer was killed during the call. `tell` takes a
    kind and a message: 'refused' for an entry that is left out because MLflow will never accept it, 'renamed' for a
    name that MLflow does not accept. Files outside the run's folder are never read, sent or removed.
    """

    def __init__(self, client: MlflowClient, run: Run, run_dir: Path, tell: Callable[[str, str], None]) -> None:
        self.run = run
        self.run_id = run.info.run_id
        self._client = client
        self._tell = tell
        self._keys: dict[tuple[str, str], str] = {}
        self._run_dir = run_dir.resolve()
        self._params = dict(run.data.params)
        self._tables: list[dict[str, str]] = json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]"))
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "start": lambda entry: client.update_run(self.run_id, status="RUNNING"),
            "params": self._log_params,
            "tags": lambda entry: self._log_tags(entry["tags"]),
            "note": self._log_note,
            "view": self._add_to_view,
            "model": self._log_model,
            "artifact": self._log_artifact,
            "text": self._log_text,
            "table": self._log_table,
            "images": self._log_images,
            "input": self._log_input,
            "status": self._end,
        }

    def send_metrics(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Send metrics in as few calls as MLflow allows."""
        metrics = [Metric(self._key(k), v, entry["t"], entry["s"]) for entry in entries for k, v in entry["m"].items()]
        for batch in _batched(metrics, METRICS_PER_CALL):
            try:
                log_metrics(self._client, self.run_id, batch)
            except Exception as error:
                if not self._is_final(error):
                    raise
                for metric in batch:
                    self._attempt(f"metric {metric.key!r}", self._client.log_batch, self.run_id, [metric])

    def send(self, entry: dict[str, Any]) -> None:
        """Send an entry that is not a metric.

        Raises:
            Exception: the store cannot be reached or written.
        """
        kind = next((kind for kind in self._handlers if kind in entry), None)
        if kind is None:
            self._tell("refused", f"an entry of unknown kind {[*entry]} was left out")
        else:
            self._attempt(kind, self._handlers[kind], entry)

    def _key(self, name: str, foreign: str = NAMES) -> str:
        """Return the name to use in MLflow, and report it if it differs from `name`."""
        key = self._keys.get((name, foreign))
        if key is None:
            key = self._keys[name, foreign] = clean_key(name, foreign)
            if key != name:
                self._tell("renamed", f"{name!r} is not a valid name there: it is logged as {key!r}")
        return key

    def _attempt(self, entry: str, send: Callable[..., object], *arguments: Any) -> None:
        """Send an entry, or report that it is left out if MLflow will never accept it."""
        try:
            send(*arguments)
        except Exception as error:
            if not self._is_final(error):
                raise
            self._tell("refused", f"{entry} was left out: {error}")

    def _is_final(self, error: Exception) -> bool:
        """Return whether MLflow will never accept the data. A deleted run raises an error: it may be restored.

        Raises:
            Deleted: the run or its experiment was deleted.
        """
        if not is_refusal(error):
            return False
        refuse_deleted(self._client.get_experiment(self.run.info.experiment_id))
        refuse_deleted(self._client.get_run(self.run_id))
        return True

    def _end(self, entry: dict[str, Any]) -> None:
        if entry["status"] not in ("FINISHED", "FAILED", "KILLED"):
            raise wrong_argument("status", entry["status"], "must be FINISHED, FAILED or KILLED")
        self._client.set_terminated(self.run_id, entry["status"], entry["t"])

    def _log_params(self, entry: dict[str, Any]) -> None:
        new: list[Param] = []
        changed: dict[str, str] = {}
        for key, value in entry["params"].items():
            key = self._key(key)
            value = shortened(value, PARAM_LENGTH)
            is_late = entry.get("resumed") and key not in self._params
            if not is_late and self._params.setdefault(key, value) == value:
                new.append(Param(key, value))
            else:  # MLflow's parameters are immutable, and hold from the beginning of a run
                changed[f"param_changed.{key}"] = value
        for batch in _batched(new, PAIRS_PER_CALL):
            self._client.log_batch(self.run_id, params=batch)
        self._log_tags(changed)

    def _log_tags(self, values: dict[str, str]) -> None:
        tags = [RunTag(self._key(key), shortened(value, TAG_LENGTH)) for key, value in values.items()]
        for batch in _batched(tags, PAIRS_PER_CALL):
            self._client.log_batch(self.run_id, tags=batch)

    def _log_note(self, entry: dict[str, Any]) -> None:
        """Describe the run, unless it has a description, which someone may have edited in the UI."""
        if NOTE not in self.run.data.tags:
            runs = f"[All runs and their results](#/experiments/{self.run.info.experiment_id}/runs?{SHARED_VIEW})"
            self._log_tags({NOTE: f"{entry['note']}\n\n{runs}"})

    def _link_in_note(self, path: str) -> None:
        """Link a picture among the run's artifacts from its description, which is too narrow to show the picture."""
        note = self._client.get_run(self.run_id).data.tags.get(NOTE, "")
        page = f"#/experiments/{self.run.info.experiment_id}/runs/{self.run_id}/artifacts/{quote(path)}"
        link = f"[{Path(path).stem.replace('_', ' ').capitalize()}]({page})"
        if link not in note and len(note) + len(link) < TAG_LENGTH:
            self._client.set_tag(self.run_id, NOTE, f"{note}\n\n{link}".lstrip())

    def _add_to_view(self, entry: dict[str, Any]) -> None:
        """Add columns to the experiment's view 'Results', a list of runs, which is created if it does not exist.

        Columns have the UI's names, such as "params.`optimizer.lr`".
        """
        experiment_id = self.run.info.experiment_id
        try:
            view = json.loads(self._client.get_experiment(experiment_id).tags.get(VIEW, ""))
            state = json.loads(view["state"])
            selected = [str(column) for column in state["selectedColumns"]]
        except (ValueError, TypeError, KeyError):
            view = {"name": "Results", "createdAt": now_ms()}
            state = {}
            selected = []
        new = [column for column in map(str, entry["view"]) if len(column) <= VIEW_COLUMN_LENGTH]
        columns = list(dict.fromkeys([*selected, *new]))[:VIEW_COLUMNS]
        if columns != selected:
            view |= {"updatedAt": now_ms(), "state": json.dumps(state | {"selectedColumns": columns})}
            self._client.set_experiment_tag(experiment_id, VIEW, json.dumps(view))

    def _log_model(self, entry: dict[str, Any]) -> None:
        from runner.callbacks._mlflow.logged_model import log_model, register

        if not is_id(entry["model"]):
            raise wrong_argument("model", entry["model"], f"must be the name of a folder in {FILES}")
        folder = self._own_file(f"mlflow/{FILES}/{entry['model']}")
        model = log_model(self._client, self.run, entry, folder)
        if entry.get("register"):
            register(self._client, str(entry["register"]), model)
        shutil.rmtree(folder, ignore_errors=True)

    def _log_text(self, entry: dict[str, Any]) -> None:
        file = artifact_path(entry["file"])
        if file is None:
            raise wrong_argument("file", entry["file"], "must be the name of a file")
        self._client.log_text(self.run_id, entry["text"], file)

    def _log_table(self, entry: dict[str, Any]) -> None:
        file = f"tables/{self._key(entry['table'], PATHS)}.json"
        # Not log_table, which appends to an earlier table and imports pandas.
        rows = [[_to_cell(value) for value in row] for row in entry["rows"]]
        self._client.log_text(self.run_id, json.dumps({"columns": entry["columns"], "data": rows}), file)
        if {"path": file, "type": "table"} not in self._tables:
            self._tables.append({"path": file, "type": "table"})
            self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps(self._tables))

    def _log_artifact(self, entry: dict[str, Any]) -> None:
        path = self._own_file(entry["artifact"])
        folder = artifact_path(entry["folder"] or ".")
        self._client.log_artifact(self.run_id, str(path), folder)
        if folder in PICTURES and path.suffix == ".png":
            self._link_in_note(f"{folder}/{path.name}")
        if path.is_relative_to(copies := self._run_dir / "mlflow" / FILES):
            shutil.rmtree(copies / path.relative_to(copies).parts[0], ignore_errors=True)

    def _own_file(self, name: str) -> Path:
        """Return a file or folder in the run's folder. It is checked, because someone else may have made the spool."""
        path = self._run_dir / name
        for inner in chain((path,), path.rglob("*")):  # check the path itself before walking it
            if not inner.resolve().is_relative_to(self._run_dir) or ".." in inner.parts:
                raise ValueError(f"{inner} is not in the run's folder {self._run_dir}")
            if inner.exists() and not (inner.is_file() or inner.is_dir()):
                raise ValueError(f"{inner} is neither a file nor a folder")
        return path

    def _log_images(self, entry: dict[str, Any]) -> None:
        """Log images and their previews, with names from which MLflow's UI reads the key, step and time.

        MLflow's `log_image` makes up a new name at each call, so an image that is sent again would appear twice.
        """
        file = self._own_file(f"mlflow/{IMAGES}/{Path(entry['file']).name}")
        images = read_images(file, entry["captions"])
        key = self._key(entry["images"], PATHS).replace("/", "~")
        with tempfile.TemporaryDirectory() as folder:
            for index, image in enumerate(images):
                number = f"~{index:02d}" if len(images) > 1 else ""
                stem = f"{key}{number}+step+{entry['s']}+timestamp+{entry['t']}+{file.stem}-{index}"
                image.save(f"{folder}/{stem}.png")
                image.thumbnail((PREVIEW, PREVIEW))
                image.save(f"{folder}/{stem}+compressed.webp")
            self._client.log_artifacts(self.run_id, folder, "images")
        self._client.set_tag(self.run_id, "mlflow.loggedImages", "True")
        file.unlink(missing_ok=True)

    def _log_input(self, entry: dict[str, Any]) -> None:
        description = entry["input"]
        dataset = Dataset(
            name=shortened(description["name"], DATASET_NAME_LENGTH),
            digest=description["digest"],
            source_type="code",
            source=json.dumps({"tags": description["source"]}),
            schema=json.dumps(description["schema"]) if "schema" in description else None,
            profile=json.dumps(description["profile"]),
        )
        context = InputTag("mlflow.data.context", description["context"])
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, [context])])


def clean_key(key: str, foreign: str) -> str:
    """Return a key that MLflow accepts, with `_` for characters that match `foreign`, and a hash to keep it distinct.

    The hash depends only on the key, so that a resumed run uses the same key.
    """
    parts = re.sub(foreign, "_", key).split("/")
    cleaned = "/".join("__" if part == ".." else part for part in parts if part not in ("", ".")) or "_"
    if cleaned == key and len(key) <= KEY_LENGTH:
        return key
    return f"{cleaned[: KEY_LENGTH - 9]}_{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"


def is_refusal(error: Exception) -> bool:
    """Return whether an error means that MLflow was reached and will never accept the data."""
    if isinstance(error, mlflow.exceptions.MlflowException):
        return error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
    if isinstance(error, requests.HTTPError):  # from an artifact store
        return error.response is not None and error.response.status_code in (400, 413, 422)
    if isinstance(error, requests.RequestException):  # before `ValueError`, a base class of some of these
        return False
    # These are raised for an entry that a trainer would not have written.
    return isinstance(error, ValueError | TypeError | LookupError | AttributeError | FileNotFoundError)


def read_images(path: Path, captions: Sequence[str] | None) -> list[Image]:
    """Return the images in an array file (N, H, W, C), C 1 or 3, uint8, with their captions drawn below."""
    import numpy as np
    from PIL.Image import fromarray

    images = [fromarray(array[..., 0] if array.shape[-1] == 1 else array) for array in np.load(path)]
    if captions is None:
        return images
    return [add_caption(image, caption) for image, caption in zip(images, captions, strict=True)]


def add_caption(image: Image, caption: str) -> Image:
    """Return the image with its caption below, enlarged by an integer factor so that the caption fits."""
    from PIL import ImageDraw
    from PIL.Image import Resampling, new

    factor = max(1, -(-CAPTION_WIDTH // image.width))
    image = image.convert("RGB").resize((image.width * factor, image.height * factor), Resampling.NEAREST)
    lines = textwrap.wrap(caption, LINE_LENGTH)
    canvas = new("RGB", (image.width, image.height + LINE_HEIGHT * len(lines) + 4), "white")
    canvas.paste(image)
    ImageDraw.Draw(canvas).multiline_text((2, image.height + 2), "\n".join(lines), fill="black")
    return canvas


def _to_cell(value: Any) -> Any:
    """Return a value for a table, as text if JSON cannot represent it, so that the UI can read the table."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _batched(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
