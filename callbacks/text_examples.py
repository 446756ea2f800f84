"""Logs examples of the texts that a model generates in evaluations."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from runner import Callback
from runner.failures.checks import check_whole

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

COLUMNS = ("batch", "input", "reference", "generated")
MAX_ROWS = 1000  # the whole table is logged each time


class TextExamples(Callback):
    """Logs a table with the first texts of each evaluation: the input, the reference and the generated text.

    For transformers models with `generation`; for any other model it warns once and does nothing. Rank 0 logs the
    samples of its share of the data.

    Args:
        num_texts: number of texts in each evaluation, at least 1.

    Raises:
        ValueError: `num_texts` is out of range.

    Logs:
        texts/{label}: a table of the last 1000 texts of an evaluator, with the batch of each.
    """

    def __init__(self, num_texts: int = 8) -> None:
        check_whole("num_texts", num_texts, 1, "a number of texts")
        self.num_texts = num_texts
        self._rows: dict[str, list[list[Any]]] = {}
        self._new: list[list[Any]] = []
        self._is_enabled = False

    def init(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        generates = getattr(state.unwrapped_model, "generates", False)
        self._is_enabled = generates and get_global_rank() == 0
        if not generates and get_global_rank() == 0:
            log.warning("text_examples does nothing: the model generates no texts; set model.generation")

    def eval_start(self, state: State, logger: Logger) -> None:
        self._new = []

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self._is_enabled and len(self._new) < self.num_texts:
            texts: Any = state.unwrapped_model.texts(state.batch)  # pyright: ignore[reportCallIssue]
            rows = ([state.timestamp.batch, *row] for row in zip(*texts, strict=True))
            self._new = [*self._new, *rows][: self.num_texts]

    def eval_end(self, state: State, logger: Logger) -> None:
        if self._is_enabled and self._new:
            label = str(state.dataloader_label)
            self._rows[label] = [*self._rows.get(label, []), *self._new][-MAX_ROWS:]
            logger.log_table(COLUMNS, self._rows[label], f"texts/{label}")

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = state["rows"]
