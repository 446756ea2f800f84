"""A model in MLflow: rows of texts or images in, classes or generated texts out. MLflow runs a copy of this file.

It needs torch, and transformers for texts or Pillow for images, but not the runner. Nothing is unpickled: weights are
safetensors or a torch.export program, and all else is JSON.
"""

import base64
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pandas
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel

AUTO_CLASSES = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}
ROWS = 32  # rows that run through the model together


class ServedModel(PythonModel):
    """Predicts a `label` with its `score` and all `probabilities`, a `value` (regression), or `generated` text."""

    def load_context(self, context: Any) -> None:
        """Load the model on the CPU."""
        folder = Path(context.artifacts["model"])
        facts = json.loads((folder / "serving.json").read_text())
        self.columns = [str(name) for name in facts["columns"]]
        self.model: Any = (_Texts if facts["task"] in AUTO_CLASSES else _Images)(folder, facts)

    def predict(self, context: Any, model_input: pandas.DataFrame, params: Any = None) -> Any:
        """Return one row of predictions for each row of texts or images.

        Raises:
            ValueError: the table has no rows or lacks a column, or a value is not a text or an image.
        """
        import torch

        noun = self.model.noun
        columns = ", ".join(map(repr, self.columns))
        if not isinstance(model_input, pandas.DataFrame) or not {*self.columns} <= {*model_input.columns}:
            raise ValueError(f"the model takes a DataFrame with the {noun} in {columns}")
        if model_input.empty:
            raise ValueError(f"the table has no rows: give at least one, with the {noun} in {columns}")
        values = [model_input[name].tolist() for name in self.columns]
        rows: list[dict[str, Any]] = []
        with torch.no_grad():
            for start in range(0, len(values[0]), ROWS):
                rows += self.model.predict([column[start : start + ROWS] for column in values], start)
        return pandas.DataFrame(rows)


class _Texts:
    """A transformers model with its tokenizer."""

    noun = "text"

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        import transformers

        self.task = facts["task"]
        self.columns = ", ".join(map(repr, facts["columns"]))
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        kind = getattr(transformers, AUTO_CLASSES[self.task])
        self.network: Any = kind.from_pretrained(folder, use_safetensors=True).eval()
        self.longest = int(facts["longest"])

    def predict(self, values: list[list[Any]], first: int) -> list[dict[str, Any]]:
        if not all(isinstance(text, str) for column in values for text in column):
            raise ValueError(f"a value in {self.columns} is not text: every row needs one")
        is_causal = self.task == "causal_lm"
        # A prompt is cut and padded on the left, because the new text follows its end.
        self.tokenizer.padding_side = self.tokenizer.truncation_side = "left" if is_causal else "right"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.convert_ids_to_tokens(0)
        batch = self.tokenizer(*values, truncation=True, max_length=self.longest, padding=True, return_tensors="pt")
        if self.task == "sequence_classification":
            config = self.network.config
            logits = self.network(**batch).logits.float()
            if config.problem_type == "regression" or config.num_labels == 1:
                return [{"value": float(row[0])} for row in logits]
            return _describe(logits, [config.id2label[number] for number in range(config.num_labels)])
        batch.pop("token_type_ids", None)
        tokens = self.network.generate(**batch)[:, batch["input_ids"].shape[1] if is_causal else 0 :]
        decoded = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [{"generated": text.strip()} for text in decoded]


class _Images:
    """An exported classifier, with the code that prepared the images of the run's evaluations."""

    noun = "image"

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        import torch

        spec: Any = importlib.util.spec_from_file_location("served_pixels", folder / "pixels.py")
        self.pixels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.pixels)
        self.preparation = self.pixels.Preparation(**facts["preparation"])
        self.network = torch.export.load(folder / "model.pt2").module()
        self.classes = facts["classes"]
        self.shape = tuple(facts["shape"])
        self.dtype = getattr(torch, facts["dtype"])

    def predict(self, values: list[list[Any]], first: int) -> list[dict[str, Any]]:
        import torch

        images = [self._read(value, row) for row, value in enumerate(values[0], first)]
        batch = self.preparation.normalized(torch.stack(images))
        return _describe(self.network(batch.to(self.dtype)).float(), self.classes)

    def _read(self, value: Any, row: int) -> Any:
        """Return an image, uint8 `(3, H, W)`. A string is never a path, so requests cannot read the server's files."""
        try:
            if isinstance(value, str):
                value = base64.decodebytes(value.encode())
            elif isinstance(value, Path):
                value = value.read_bytes()
            elif isinstance(value, numpy.ndarray):
                from PIL import Image

                value = Image.fromarray(value)
            elif not isinstance(value, bytes):
                raise TypeError(f"it is a {type(value).__name__}")
            pixels = self.preparation(self.pixels.read_rgb(value))
        except (OSError, TypeError, ValueError) as error:
            allowed = "the bytes of an image file, raw or in base64, a pathlib.Path, or a uint8 array (H, W, C)"
            raise ValueError(f"row {row} is not an image: {error}; give {allowed}") from error
        if pixels.shape != self.shape:
            sizes = f"{tuple(pixels.shape[1:])}, but the model takes {self.shape[1:]}"
            raise ValueError(f"row {row} has the height and width {sizes}")
        return pixels


def _describe(logits: Any, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the prediction for each row of logits `(N, C)`."""
    rows = []
    for row in logits:
        probabilities = dict(zip(classes, row.softmax(-1).tolist(), strict=True))
        label = classes[int(row.argmax())]
        rows.append({"label": label, "score": probabilities[label], "probabilities": probabilities})
    return rows


set_model(ServedModel())
