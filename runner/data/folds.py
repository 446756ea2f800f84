"""Cross-validation: training and evaluation samples are pooled and redistributed, so that each is evaluated on once."""

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
    """Divides the samples of a run's training and evaluation data into folds, and holds one out for evaluation.

    The folds differ by at most one sample. They depend on `seed` and not on the run's own seed, unless that makes or
    splits the data. Samples for evaluation are read as the evaluation data are, without augmentation: by the evaluation
    loader's `transform`, or by that of its data set. Test data stay as they are.

    Args:
        held_out: the fold that is evaluated on and not trained on, in [0, count).
        count: number of folds, at least 2.
        stratified: whether every fold has the same share of each class. Labels are the last tensor of data in memory,
            and the attribute `targets` of other data sets.
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
        """Make a training loader read all folds but one, and an evaluation loader that one.

        Raises:
            TypeError: the loaders are not the runner's own, or have nothing that says the classes.
            ValueError: there are fewer samples than folds, or samples of other shapes for training than for evaluation.
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
        for loader, pool, chosen in zip((train, evaluation), pools, (~is_held_out, is_held_out), strict=True):
            _read(loader, pool, chosen.nonzero().squeeze(1))

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
    """Return all samples as training and as evaluation read them."""
    if isinstance(train, TensorLoader) and isinstance(evaluation, TensorLoader):
        pairs = [*zip(train.tensors, evaluation.tensors, strict=True)]
        if any(first.shape[1:] != second.shape[1:] for first, second in pairs):
            raise ValueError("folds need samples of one shape for training and evaluation")
        pooled = [torch.cat(pair) for pair in pairs]
        return pooled, pooled
    if isinstance(train, DatasetLoader) and isinstance(evaluation, DatasetLoader):
        first = train.dataset
        second = evaluation.dataset
        return ConcatDataset([first, _read_as(first, second)]), ConcatDataset([_read_as(second, first), second])
    return None, None


def _read_as(example: Any, dataset: Any) -> Dataset[Any]:
    """Return a data set that transforms its samples as another one does."""
    if not hasattr(example, "transform") or not hasattr(dataset, "transform"):
        return dataset
    dataset = copy.copy(dataset)
    dataset.transform = example.transform
    if hasattr(dataset, "transforms"):  # torchvision's data sets call this one
        dataset.transforms = copy.copy(dataset.transforms)
        dataset.transforms.transform = example.transform
    return dataset


def _read(loader: Any, pool: Any, chosen: Tensor) -> None:
    """Make a loader read the chosen samples of a pool; made-up loaders have no pool."""
    if isinstance(loader, TensorLoader):
        loader.tensors = tuple(one[chosen] for one in pool)
    elif isinstance(loader, DatasetLoader):
        loader.read(Subset(pool, chosen.tolist()))
    loader.order.resize(len(chosen))


def _labels(train: OrderedLoader, evaluation: OrderedLoader) -> Tensor | None:
    """Return the class of each sample `(samples,)`; None of made-up data."""
    if isinstance(train, FakeLoader):
        return None
    found = []
    for loader in (train, evaluation):
        if isinstance(loader, TensorLoader):
            labels: Any = loader.tensors[-1]
        else:
            labels = torch.as_tensor(getattr(loader.dataset, "targets", ()))  # type: ignore[attr-defined]
        if labels.is_floating_point() or labels.shape != (loader.order.num_samples,):
            reason = "the class of a sample is unknown: the data has no last tensor or `targets` of whole numbers"
            raise TypeError(f"stratified=True: {reason}")
        found.append(labels)
    return torch.cat(found)
