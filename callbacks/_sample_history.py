"""Statistics of each sample of a data set over the epochs, as tensors (N,) by name on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.models.sample_losses import worst_samples

History = dict[str, Tensor]
"""For each sample: in how many `epochs` it was seen, and its `total` and `last` loss; with classes also its last
`prediction` and `label`, the epoch in which it was first `learned` (from 1; 0: never), and how often `forgotten`."""


def new_history(num_samples: int) -> History:
    """Return the history of samples that have not been seen yet."""
    counts = ("epochs", "learned", "forgotten", "prediction", "label")
    return {
        **{name: torch.zeros(num_samples, dtype=torch.int32) for name in counts},
        "total": torch.zeros(num_samples, dtype=torch.float64),
        "last": torch.full((num_samples,), torch.nan),
    }


def add_epoch(history: History, losses: Tensor, classes: Tensor | None, seen: Tensor, epoch: int) -> History:
    """Return the history with one more epoch. Losses that are not finite do not count.

    A sample is learned when its prediction is right for the first time, and forgotten when its prediction was right the
    last time and is wrong now (Toneva et al. 2019, arXiv:1812.05159).

    Args:
        history: history of N samples; it is not changed.
        losses: loss of each sample (N,).
        classes: prediction and label of each sample (2, N), int32; None if the model predicts no classes.
        seen: whether each sample was seen in this epoch (N,), bool.
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
    """Return each sample's mean loss over the epochs (N,), float64; 0 for samples that were never seen."""
    return history["total"] / history["epochs"].clamp(min=1)


def find_suspects(history: History, share: float) -> Tensor:
    """Return the indices of the seen samples with the highest mean losses, highest first, int64.

    A wrong label is learned late or never, so its mean loss over the epochs stays high even if the model memorizes it
    in the end (Arpit et al. 2017, arXiv:1706.05394).

    Args:
        history: history of N samples.
        share: share of the N samples to return, in (0, 1], rounded to at least one sample.
    """
    count = max(1, round(share * len(history["epochs"])))
    order = worst_samples(mean_losses(history).masked_fill(history["epochs"] == 0, -torch.inf), count)
    return order[history["epochs"][order] > 0]
