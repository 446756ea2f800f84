"""Writes an image classifier and the code that prepares its images, which the writer makes into an MLflow model."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from runner.callbacks._export import write
from runner.callbacks._mlflow.spool import IMAGE_MODEL, MODEL
from runner.callbacks._mlflow.text_model_file import CLASS_COLUMNS
from runner.data.classes import holder_of
from runner.data.content import digest
from runner.data.images import pixels
from runner.libraries.hugging_face import import_hf
from runner.models.classification import ClassificationModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from runner import State

log = logging.getLogger("runner")


def preparation_of(state: State) -> pixels.Preparation | None:
    """Return how evaluations prepare the images of a classifier; None if it has other inputs or cannot be served."""
    model: Any = state.unwrapped_model
    holder = _holder(state)
    if holder is None or not isinstance(model, ClassificationModel) or not isinstance(model.inputs, int | str):
        return None
    if isinstance(holder.preparation, pixels.Preparation) and not model.multi_label:
        return holder.preparation
    reason = "an image may have several classes" if model.multi_label else "data.eval_transforms are not saved with it"
    log.info("MLflow: the logged model takes prepared tensors instead of image files, because %s", reason)
    return None


def example_of(state: State, preparation: pixels.Preparation) -> Tensor | None:
    """Return random inputs `(2, 3, H, W)` of the size that evaluations use; None if training uses the same size."""
    if preparation.size is None:
        return None
    generator = torch.Generator().manual_seed(0)
    shape = (2, len(preparation.mean), preparation.size, preparation.size)
    return state.precision.cast(torch.randn(shape, generator=generator))


def write_image_model(
    state: State, preparation: pixels.Preparation, module: nn.Module, inputs: Tensor, folder: Path
) -> dict[str, Any]:
    """Write the program, `serving.json`, and the code that reads images, and return their spool entry."""
    folder = folder / IMAGE_MODEL
    folder.mkdir()
    write("torch_export", module, inputs, folder / MODEL, dynamic_batch=True)
    shutil.copyfile(pixels.__file__, folder / "pixels.py")
    model: Any = state.unwrapped_model
    columns = [getattr(_holder(state), "columns", {}).get("inputs", "image")]
    facts = {"task": "image_classification", "columns": columns, "shape": [*inputs.shape[1:]]}
    facts |= {"classes": model.class_names or [str(number) for number in range(model.num_classes)]}
    facts |= {"preparation": preparation._asdict(), "dtype": str(inputs.dtype).removeprefix("torch.")}
    (folder / "serving.json").write_text(json.dumps(facts))
    versions = {"pillow": import_hf("PIL").__version__, "numpy": numpy.__version__}
    entry = {"digest": digest([*module.state_dict().values()]), "columns": columns, "input": "binary"}
    return entry | {"results": CLASS_COLUMNS, "versions": versions}


def _holder(state: State) -> Any:
    """Return the loader or the data set that prepares the images of evaluations; None if there is none."""
    loaders = [evaluator.dataloader for evaluator in state.evaluators]
    return holder_of((loaders or [state.train_dataloader])[0], "preparation")
