"""Statistics of each sample of a data set over epochs, as tensors `(N,)` by name on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.models.sample_losses import worst_samples

History = dict[str, Tensor]
"""`epochs` in which the sample was seen; `total` and `last` loss; for classes also the last `prediction` and `label`,
the epoch in which it was first `learned` (from 1; 0: never), and how often it was `forgotten`."""


def new_history(num_samples: int) -> History:
    """Return the history of samples that were never seen."""
    counts = ("epochs", "learned", "forgotten", "prediction", "label")
    return {
        **{name: torch.zeros(num_samples, dtype=torch.int32) for name in counts},
        "total": torch.zeros(num_samples, dtype=torch.float64),
        "last": torch.full((num_samples,), torch.nan),
    }


def add_epoch(history: History, losses: Tensor, classes: Tensor | None, seen: Tensor, epoch: int) -> History:
    """Return a history with one more epoch. A loss that is not finite does not count.

    A sample is learned when its prediction is right, and forgotten when it was right in the epoch before and is not any
    more (Toneva et al. 2019, arXiv:1812.05159).

    Args:
        history: history of N samples; it is not changed.
        losses: loss (N,) of each sample.
        classes: prediction and label (2, N) of each sample, int32; None where the model predicts no classes.
        seen: whether each sample was seen in this epoch, bool (N,).
        epoch: number of the epoch, from 1.
    """
    seen = seen & losses.isfinite()
    new = {
        "epochs": history["epochs"] + 1,
        "total": history["total"] + losses,
        "last": losses,
    }
    if classes is not None:
        prediction, label = classes
        was_right = (history["epochs"] > 0) & (history["prediction"] == history["label"])
        is_right = prediction == label
        new |= {
            "prediction": prediction,
            "label": label,
            "learned": torch.where(is_right & (history["learned"] == 0), epoch, history["learned"]),
            "forgotten": history["forgotten"] + (was_right & ~is_right),
        }
    return {name: torch.where(seen, new.get(name, before), before) for name, before in history.items()}


def mean_losses(history: History) -> Tensor:
    """Return the mean over epochs of each sample's loss (N,), float64; 0 for one that was never seen."""
    return history["total"] / history["epochs"].clamp(min=1)


def find_suspects(history: History, share: float) -> Tensor:
    """Return the samples with the highest mean losses, highest first: int64, at least one, at most those seen.

    A wrong label is learned late or never, so its mean loss over the epochs stays high even where the model learns it
    by heart in the end (Arpit et al. 2017, arXiv:1706.05394).

    Args:
        history: history of N samples.
        share: share of the samples to return, in (0, 1].
    """
    count = max(1, round(share * len(history["epochs"])))
    order = worst_samples(mean_losses(history).masked_fill(history["epochs"] == 0, -torch.inf), count)
    return order[history["epochs"][order] > 0]
