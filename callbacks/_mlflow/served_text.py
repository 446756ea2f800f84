"""A model of transformers in MLflow: rows of texts in, classes or generated texts out. MLflow runs a copy of this file.

It needs transformers and torch, but not the runner. Nothing is unpickled: weights are safetensors, all else is JSON.
"""

import json
from pathlib import Path
from typing import Any

import pandas
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel

AUTO_CLASSES = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}
ROWS = 32  # texts that run through the model together


class ServedText(PythonModel):
    """Predicts a `label` and its `score`, a `value` (regression), or the text `generated` for each row."""

    def load_context(self, context: Any) -> None:
        """Load the model and its tokenizer on the CPU."""
        import transformers

        folder = Path(context.artifacts["model"])
        facts = json.loads((folder / "serving.json").read_text())
        self.task = facts["task"]
        self.columns = [str(name) for name in facts["columns"]]
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        kind = getattr(transformers, AUTO_CLASSES[self.task])
        self.model: Any = kind.from_pretrained(folder, use_safetensors=True).eval()
        self.longest = int(facts["longest"])

    def predict(self, context: Any, model_input: pandas.DataFrame, params: Any = None) -> Any:
        """Return a table with a row for each row of a table of texts.

        Raises:
            ValueError: the table has no rows, lacks a column, or a value is not text.
        """
        import torch

        columns = ", ".join(map(repr, self.columns))
        if not isinstance(model_input, pandas.DataFrame) or not {*self.columns} <= {*model_input.columns}:
            raise ValueError(f"the model takes a DataFrame with the text in {columns}")
        if model_input.empty:
            raise ValueError(f"the table has no rows: give at least one, with the text in {columns}")
        texts = [model_input[name].tolist() for name in self.columns]
        if not all(isinstance(text, str) for column in texts for text in column):
            raise ValueError(f"a value in {columns} is not text: every row needs one")
        rows: list[dict[str, Any]] = []
        with torch.no_grad():
            for start in range(0, len(texts[0]), ROWS):
                rows += self._predict([column[start : start + ROWS] for column in texts])
        return pandas.DataFrame(rows)

    def _predict(self, texts: list[list[str]]) -> list[dict[str, Any]]:
        is_causal = self.task == "causal_lm"
        # A prompt is cut and padded on the left, because the new text follows its end.
        self.tokenizer.padding_side = self.tokenizer.truncation_side = "left" if is_causal else "right"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.convert_ids_to_tokens(0)
        batch = self.tokenizer(*texts, truncation=True, max_length=self.longest, padding=True, return_tensors="pt")
        if self.task == "sequence_classification":
            return [self._describe(logits) for logits in self.model(**batch).logits.float()]
        batch.pop("token_type_ids", None)
        tokens = self.model.generate(**batch)[:, batch["input_ids"].shape[1] if is_causal else 0 :]
        decoded = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [{"generated": text.strip()} for text in decoded]

    def _describe(self, logits: Any) -> dict[str, Any]:
        """Return the prediction for a row with these logits `(C,)`."""
        config = self.model.config
        if config.problem_type == "regression" or config.num_labels == 1:
            return {"value": float(logits[0])}
        best = int(logits.argmax())
        return {"label": config.id2label[best], "score": float(logits.softmax(-1)[best])}


set_model(ServedText())
