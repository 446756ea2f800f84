"""Stand-ins for a run's data in a dry run: one batch of each data set."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from runner.data import FakeLoader, SampleOrder
from runner.device.batch import split
from runner.distributed.ranks import get_world_size
from runner.training.evaluator import Evaluator
from runner.trials.batch_text import describe_batch

SAMPLES = 4
"""Samples in the batch that goes through the run."""


class OneBatch:
    """Stands in for a loader, and yields one batch per epoch: the first samples of the loader's first batch.

    The loader is read only when the run needs its data. By then callbacks and algorithms have prepared it, for example
    with the policy that generates its batches. Attributes are read from and set on the real loader.

    Args:
        loader: the real loader, which is read only once.
        label: 'train', or the label of an evaluator.
        batch: a batch to yield instead of those samples.
        samples: the number of samples in a batch.
    """

    is_fake = True  # so checkpoints do not record its order of samples
    _loader: Any
    _label: str
    _model: Any
    _whole: list[Any]
    _batches: list[Any]

    def __init__(self, loader: Any, label: str, batch: Any = None, samples: int = SAMPLES) -> None:
        # A plain assignment would set the attribute on the real loader.
        batches = [] if batch is None else [batch]
        vars(self).update(_loader=loader, _label=label, _model=None, _whole=[], _batches=batches)
        order = getattr(loader, "order", None)
        if order is not None:
            ranks = get_world_size()
            size = min(samples * ranks, order.batch_size)
            vars(self)["order"] = SampleOrder(order.num_samples, size, shuffle=False, rank=0, world_size=ranks)

    def __getattr__(self, name: str) -> Any:
        if name == "to":  # batches are moved one by one, because a retry may use another device
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batch, and keep it for a second try."""
        if not self._batches:
            self._batches.append(self.take(SAMPLES))
        yield from self._batches

    def take(self, samples: int | None) -> Any:
        """Return the first samples of the loader's first batch; the whole batch for None, or if it cannot be split."""
        loader = self._loader
        if isinstance(loader, FakeLoader):
            size = loader.order.batch_size
            return loader.make(size if samples is None else min(samples, size))
        if not self._whole:  # read the loader only once
            self._whole.extend(islice(loader, 1))
        if not self._whole:
            raise ValueError(f"the {self._label} data of {loader!r} has no batches")
        (batch,) = self._whole
        model = self._model
        try:
            return split(batch, model.num_samples(batch), model.slice_batch, size=samples)[0][1]
        except (TypeError, ValueError):
            return batch

    def yielding(self, batch: Any, samples: int | None) -> OneBatch:
        """Return a stand-in for the same loader that yields another batch, of `samples` samples."""
        return OneBatch(self._loader, self._label, batch, samples or SAMPLES)

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Do nothing: all batches are the same."""

    def read_for(self, model: Any) -> None:
        """Let a model choose which samples of the first batch to yield."""
        vars(self)["_model"] = model

    def describe(self) -> str:
        """Return the types and shapes of the batch, which must have been read."""
        return describe_batch(self._batches[0])


class TrialData(NamedTuple):
    """Stand-ins for a run's data, with one batch in each loader.

    `order` is the order of the real training samples, or None if unknown. Each evaluator has a `OneBatch`.
    """

    order: SampleOrder | None
    train: OneBatch
    evaluators: list[Evaluator]
