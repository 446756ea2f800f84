"""The classes of labeled training data: their names, their number, and how often each occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from runner.data.fake import FakeLoader
from runner.data.loaders import TensorLoader


def names_of_classes(loader: Any) -> list[str] | None:
    """Return the names of the classes, in order: the attribute `classes` of the loader or its data set; else None.

    Torchvision's data sets have this attribute too.
    """
    names = getattr(holder_of(loader, "classes"), "classes", None)
    return None if names is None else [str(name) for name in names]


def is_multi_label(loader: Any) -> bool:
    """Return whether targets are truth values `(N, C)`, so that a sample may have any number of classes."""
    if isinstance(loader, TensorLoader) and len(loader.tensors) > 1:
        labels = loader.tensors[-1]
        return labels.ndim == 2 and not labels.is_floating_point() and bool(labels.max() <= 1)
    return bool(getattr(holder_of(loader, "is_multi_label"), "is_multi_label", False))


def labels_of(loader: Any) -> Tensor | None:
    """Return the labels of all samples: class numbers `(N,)`, or truth values `(N, C)`.

    They are the last tensor of data in memory, or the attribute `targets` of a data set. Made-up data is represented by
    one sample with the largest label.

    Returns:
        int64; None if there are no whole numbers that can be read apart from the inputs, or if ranks read shares.
    """
    labels: Any = None
    if isinstance(loader, FakeLoader):
        batch = loader.make(1)
        labels = batch.get("labels") if isinstance(batch, Mapping) else batch[-1] if len(batch) == 2 else None
        labels = labels if labels is None or is_multi_label(loader) else labels.flatten()
    elif isinstance(loader, TensorLoader):
        labels = loader.tensors[-1] if len(loader.tensors) > 1 else None
    elif getattr(loader, "ranks_read", None) != "shares":
        labels = _targets(getattr(loader, "dataset", None))
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.numel() or labels.min() < 0:
        return None
    return labels.long() if labels.ndim == 1 + is_multi_label(loader) else None


def balanced_weights(labels: Tensor, number: int) -> list[float]:
    """Return the weights of C classes that make each count alike, as scikit-learn's `balanced` does.

    They are n / (C n_c) for the n_c of n samples that have class c. If samples have any number of classes, they are
    (n - n_c) / n_c: the ratio of scikit-learn's weights for the answers yes and no.

    Raises:
        ValueError: no sample has some class or, with several classes per sample, every sample has it.
    """
    total = len(labels)
    counts = (labels.sum(dim=0) if labels.ndim == 2 else labels.bincount(minlength=number)).double()
    wrong = (counts == 0) | (counts == total) if labels.ndim == 2 else counts == 0
    if wrong.any():
        share = "every" if counts[wrong][0] else "no"
        raise ValueError(f"{share} training sample has class {int(wrong.nonzero()[0])}; give numbers")
    return ((total - counts) / counts if labels.ndim == 2 else total / (number * counts)).tolist()


def holder_of(loader: Any, name: str) -> Any:
    """Return a loader, its data set, or the data set that folds divide, whichever has an attribute; else None."""
    holder = loader
    while holder is not None and getattr(holder, name, None) is None:
        parts = getattr(holder, "datasets", None)
        holder = parts[-1] if parts else getattr(holder, "dataset", None)
    return holder


def _targets(dataset: Any) -> Tensor | None:
    """Return the labels of a data set, or of the parts of data sets from which folds made it."""
    if isinstance(dataset, Subset):
        targets = _targets(dataset.dataset)
        return None if targets is None else targets[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [_targets(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else torch.cat(parts)  # type: ignore[arg-type]
    targets: Sequence[int] | Tensor | None = getattr(dataset, "targets", None)
    return None if targets is None else torch.as_tensor(targets)
