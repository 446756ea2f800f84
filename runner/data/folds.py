"""Cross-validation: pool training and evaluation samples and divide them again, so that each is evaluated once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from runner.core.randomness import stream_seed
from runner.data.fake import FakeLoader
from runner.data.loaders import DatasetLoader, OrderedLoader, TensorLoader
from runner.failures.checks import check_whole
from runner.failures.errors import wrong_argument


class Folds:
    """Divides a run's training and evaluation samples into folds and holds one fold out for evaluation.

    Fold sizes differ by at most one sample. The folds depend on `seed` and not on the run's own seed, unless that seed
    makes or splits the data. Evaluation samples go through the transform of the evaluation loader or of its data set,
    so they are not augmented. Test data are unchanged.

    Args:
        held_out: the fold to evaluate on and not to train on, in [0, count).
        count: number of folds, at least 2.
        stratified: whether every fold has the same share of each class. Labels come from the last tensor of data in
            memory, or from the attribute `targets` of other data sets.
        seed: decides which samples are in which fold; at least 0.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, held_out: int, count: int = 5, stratified: bool = False, seed: int = 0) -> None:
        check_whole("count", count, 2)
        check_whole("held_out", held_out, 0, most=count - 1)
        check_whole("seed", seed, 0)
        self.held_out = held_out
        self.count = count
        self.stratified = stratified
        self.seed = seed

    def apply(self, train: Any, evaluation: Any) -> None:
        """Make the training loader read all folds but the held-out one, which the evaluation loader reads.

        Raises:
            TypeError: the loaders are not the runner's own, or the data has no labels to stratify by.
            ValueError: there are fewer samples than folds, or training and evaluation samples differ in shape.
        """
        for loader in (train, evaluation):
            if not isinstance(loader, TensorLoader | DatasetLoader | FakeLoader) or type(loader) is not type(train):
                kinds = f"{type(train).__name__} and {type(evaluation).__name__}"
                raise TypeError(f"folds need data from two TensorLoaders or two DatasetLoaders, not {kinds}")
        sizes = train.order.num_samples, evaluation.order.num_samples
        if sum(sizes) < self.count:
            raise wrong_argument("count", self.count, f"there are only {sum(sizes)} samples")
        is_held_out = self.assign(sum(sizes), _labels(train, evaluation) if self.stratified else None) == self.held_out
        pools = _pool(train, evaluation)
        for loader, pool, mask in zip((train, evaluation), pools, (~is_held_out, is_held_out), strict=True):
            _restrict(loader, pool, mask.nonzero().squeeze(1))

    def assign(self, samples: int, labels: Tensor | None = None) -> Tensor:
        """Return the fold of each sample, int64 `(samples,)`; with labels `(samples,)`, each class is spread evenly."""
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "folds"))
        order = torch.randperm(samples, generator=generator)
        if labels is not None:
            order = order[labels[order].argsort(stable=True)]
        folds = torch.empty(samples, dtype=torch.int64)
        folds[order] = torch.arange(samples) % self.count
        return folds


def _pool(train: OrderedLoader, evaluation: OrderedLoader) -> tuple[Any, Any]:
    """Return the pool of all samples twice: as training reads them, and as evaluation reads them."""
    if isinstance(train, TensorLoader) and isinstance(evaluation, TensorLoader):
        pairs = [*zip(train.tensors, evaluation.tensors, strict=True)]
        if any(training.shape[1:] != held_out.shape[1:] for training, held_out in pairs):
            raise ValueError("folds need samples of one shape for training and evaluation")
        pooled = [torch.cat(pair) for pair in pairs]
        return pooled, pooled
    if isinstance(train, DatasetLoader) and isinstance(evaluation, DatasetLoader):
        pool = ConcatDataset([train.dataset, _with_transform_of(train.dataset, evaluation.dataset)])
        held_out_pool = ConcatDataset([_with_transform_of(evaluation.dataset, train.dataset), evaluation.dataset])
        return pool, held_out_pool
    return None, None


def _with_transform_of(example: Any, dataset: Any) -> Dataset[Any]:
    """Return a copy of a data set with the transform of `example`, or the data set itself if either has none."""
    if not hasattr(example, "transform") or not hasattr(dataset, "transform"):
        return dataset
    dataset = copy.copy(dataset)
    dataset.transform = example.transform
    if hasattr(dataset, "transforms"):  # torchvision's data sets call this attribute
        dataset.transforms = copy.copy(dataset.transforms)
        dataset.transforms.transform = example.transform
    return dataset


def _restrict(loader: Any, pool: Any, indices: Tensor) -> None:
    """Make a loader read these samples of a pool; for a `FakeLoader`, which has no pool, only their number counts."""
    if isinstance(loader, TensorLoader):
        loader.tensors = tuple(tensor[indices] for tensor in pool)
    elif isinstance(loader, DatasetLoader):
        loader.read(Subset(pool, indices.tolist()))
    loader.order.resize(len(indices))


def _labels(train: OrderedLoader, evaluation: OrderedLoader) -> Tensor | None:
    """Return the class of each sample `(samples,)`; None for made-up data."""
    if isinstance(train, FakeLoader):
        return None
    parts = []
    for loader in (train, evaluation):
        if isinstance(loader, TensorLoader):
            labels: Any = loader.tensors[-1]
        else:
            labels = torch.as_tensor(getattr(loader.dataset, "targets", ()))  # type: ignore[attr-defined]
        if labels.is_floating_point() or labels.shape != (loader.order.num_samples,):
            reason = "the data needs classes as whole numbers, in its last tensor or in `targets`"
            raise TypeError(f"stratified=True: {reason}")
        parts.append(labels)
    return torch.cat(parts)
