"""Whether smaller values of a metric are better, judging by its name."""

from __future__ import annotations

import re

LOSSES = ("loss", "error", "perplexity")
"""Parts of the names of metrics for which a smaller value is better."""
SHORT_LOSSES = {"ppl", "mse", "rmse", "mae", "nll", "wer", "cer", "bpb", "fid"}
"""The same for whole words, since `cer` is also a part of `certainty`."""


def sounds_like_loss(name: str) -> bool:
    """Return whether smaller values of a metric are better, judging by its name alone."""
    words = {*re.split("[^a-z]+", name.lower())}
    return any(part in name.lower() for part in LOSSES) or not words.isdisjoint(SHORT_LOSSES)
