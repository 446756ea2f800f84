"""Metrics of generated texts, from torchmetrics, which is imported when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.libraries.torchmetrics import import_metric, import_torchmetrics

if TYPE_CHECKING:
    from torchmetrics import Metric
else:
    Metric = import_metric()

ROUGE = ("rouge1", "rouge2", "rougeL")
SEVERAL_REFERENCES = ("BLEUScore", "SacreBLEUScore", "CHRFScore", "TranslationEditRate", "ExtendedEditDistance")
"""Metrics of torchmetrics that take a list of references for each text."""


class TextMean(Metric):
    """Means over texts of scores in [0, 1]: exact match, or the F-measures of ROUGE; higher is better.

    `torchmetrics.text.ROUGEScore` keeps a tensor for each text, which ranks with unequal numbers of texts cannot
    gather. This metric adds up the same scores.

    Args:
        scores: 'exact_match', or variants of ROUGE, such as 'rouge1'.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False

    total: Tensor
    texts: Tensor

    def __init__(self, *scores: str) -> None:
        super().__init__()
        self.scores = scores
        self.add_state("total", default=torch.zeros(len(scores), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("texts", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, generated: Sequence[str], references: Sequence[str]) -> None:
        """Add the texts of one batch."""
        if self.scores == ("exact_match",):
            means = [sum(map(str.__eq__, generated, references)) / len(generated)]
        else:
            import_torchmetrics()
            from torchmetrics.functional.text import rouge_score

            values = rouge_score(list(generated), list(references), rouge_keys=self.scores)
            means = [float(values[f"{name}_fmeasure"]) for name in self.scores]
        self.total += torch.tensor(means, dtype=torch.float64, device=self.total.device) * len(generated)
        self.texts += len(generated)

    def compute(self) -> Any:
        """Return the mean over all texts, or the means of several scores by their names."""
        means = self.total / self.texts
        return means[0] if len(self.scores) == 1 else dict(zip(self.scores, means, strict=True))


def text_metrics() -> dict[str, Any]:
    """Return new metrics of generated texts: `ExactMatch`, `ROUGE` and `BLEU`."""
    import_torchmetrics()
    from torchmetrics.text import BLEUScore

    return {"ExactMatch": TextMean("exact_match"), "ROUGE": TextMean(*ROUGE), "BLEU": BLEUScore()}


def takes_texts(metric: Any) -> bool:
    """Return whether a metric compares texts with references."""
    kind = type(metric)
    of_texts = kind.__module__.startswith("torchmetrics.text") and kind.__name__ != "Perplexity"
    return isinstance(metric, TextMean) or of_texts


def update_with_texts(metric: Any, generated: Sequence[str], references: Sequence[str]) -> None:
    """Add texts to a metric for which `takes_texts` is true."""
    has_several = type(metric).__name__ in SEVERAL_REFERENCES
    metric.update(list(generated), [[text] for text in references] if has_several else list(references))
