"""Kinds of batches that real projects use, each with a loader that yields it and a model that takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

from runner import Evaluator, Model
from runner.data import TensorLoader
from runner.libraries.torchmetrics import import_torchmetrics

SAMPLES, BATCH = 12, 4


class Pooled(Model):
    """A linear layer on features `(N, 3)` that a subclass extracts from a batch; the loss pulls its outputs to 1."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 1)

    def inputs(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: Any) -> Tensor:
        return self.layer(self.inputs(batch))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - 1).square().mean()

    def metrics(self, train: bool) -> dict[str, Any]:
        return {} if train else {"mean": import_torchmetrics().MeanMetric()}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Any) -> None:
        metric.update(outputs)


class Items(Dataset[Any]):
    """A data set whose samples are made from their index by a function."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def row(index: int, length: int = 3) -> Tensor:
    return torch.arange(length) * 0.1 + index * 0.01


def loaders(make: Any, collate: Any) -> tuple[Any, Any]:
    return tuple(DataLoader(Items(make), BATCH, collate_fn=collate) for _ in range(2))  # type: ignore[return-value]


# Object detection as torchvision's models expect it: images of different sizes, each with a dict of targets.


def load_detection() -> tuple[Any, Any]:
    def make(index: int) -> tuple[Tensor, dict[str, Tensor]]:
        boxes = torch.rand(index % 3, 4)
        return torch.rand(3, 4 + index % 3, 5), {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64)}

    return loaders(make, lambda samples: tuple(zip(*samples, strict=True)))


class Detector(Pooled):
    def inputs(self, batch: Any) -> Tensor:
        images, targets = batch
        assert all(isinstance(target["boxes"], Tensor) for target in targets)
        return torch.stack([image.mean(dim=(1, 2)) for image in images])


# Graphs of different sizes, joined into a single graph as PyTorch Geometric does.


@dataclasses.dataclass
class GraphBatch:
    nodes: Tensor  # (all nodes, 3)
    edges: Tensor  # (2, all edges)
    graph_of_node: Tensor  # (all nodes,)
    num_graphs: int

    def to(self, device: Any) -> GraphBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)

    def __len__(self) -> int:
        return self.num_graphs


def join(sizes: list[int]) -> GraphBatch:
    nodes = torch.cat([row(size).expand(size, 3) for size in sizes])
    graph_of_node = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return GraphBatch(nodes, torch.arange(len(nodes)).repeat(2, 1), graph_of_node, len(sizes))


def load_graphs() -> tuple[Any, Any]:
    return loaders(lambda index: 1 + index % 3, join)


class GraphModel(Pooled):
    def inputs(self, batch: GraphBatch) -> Tensor:
        assert type(batch) is GraphBatch
        pooled = torch.zeros(batch.num_graphs, 3, device=batch.nodes.device)
        return pooled.index_add(0, batch.graph_of_node, batch.nodes)


class SplittingGraphModel(GraphModel):
    def slice_batch(self, batch: GraphBatch, start: int, end: int) -> GraphBatch:
        return join(torch.bincount(batch.graph_of_node)[start:end].tolist())


# A batch class without a length, so the number of samples is unknown.


class Unsized:
    def __init__(self, rows: Any) -> None:
        self.rows = torch.stack([*rows])

    def to(self, device: Any) -> Unsized:
        return Unsized(self.rows.to(device))


def load_unsized() -> tuple[Any, Any]:
    return loaders(row, Unsized)


class UnsizedModel(Pooled):
    def inputs(self, batch: Unsized) -> Tensor:
        return batch.rows


class CountingModel(UnsizedModel):
    def num_samples(self, batch: Unsized) -> int:
        return len(batch.rows)


# A batch class that can be sliced.


class Sliced(Unsized):
    def to(self, device: Any) -> Sliced:
        return Sliced(self.rows.to(device))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Sliced:
        return Sliced(self.rows[part])


def load_sliced() -> tuple[Any, Any]:
    return loaders(row, Sliced)


# Batches that torch and transformers provide.


def load_packed() -> tuple[Any, Any]:
    return loaders(lambda index: row(index).expand(1 + index % 3, 3), lambda rows: pack_sequence(rows, False))


class PackedModel(Pooled):
    def inputs(self, batch: PackedSequence) -> Tensor:
        assert batch.batch_sizes.device.type == "cpu"
        return batch.data[: int(batch.batch_sizes[0])]


def load_nested() -> tuple[Any, Any]:
    def collate(rows: Any) -> Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return loaders(lambda index: row(index).expand(1 + index % 3, 3), collate)


class NestedModel(Pooled):
    def inputs(self, batch: Tensor) -> Tensor:
        return torch.stack([sequence.mean(0) for sequence in batch.unbind()])


def load_text_pairs() -> tuple[Any, Any]:
    from transformers import BatchEncoding

    def collate(samples: Any) -> Any:
        first, second = zip(*samples, strict=True)
        return BatchEncoding({"first": torch.stack(first), "second": torch.stack(second), "text": [*"abcd"]})

    return loaders(lambda index: (row(index), row(index + 1)), collate)


class TextPairs(Pooled):
    def inputs(self, batch: Any) -> Tensor:
        assert type(batch).__name__ == "BatchEncoding" and len(batch["text"]) == len(batch["first"])
        return batch["first"] - batch["second"]


def load_views() -> tuple[Any, Any]:
    return loaders(
        lambda index: (row(index), row(index + 1)), lambda pairs: [*map(torch.stack, zip(*pairs, strict=True))]
    )


class Views(Pooled):
    def inputs(self, batch: Any) -> Tensor:
        return batch[0] - batch[1]


# Tables of numbers.


def load_table() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 3, generator=generator)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5]) + 3

    def part(first: int, last: int) -> TensorLoader:
        return TensorLoader(inputs[first:last], targets[first:last], batch_size=8, shuffle=first == 0)

    return part(0, 40), part(40, 52), part(52, 64)


class Regression(Pooled):
    def inputs(self, batch: Any) -> Tensor:
        return batch[0]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs.squeeze(1) - batch[1]).square().mean()


# Loaders that never end, and loaders that run a policy.


class Endless:
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.rand(BATCH, 3)


class Plain(Pooled):
    def inputs(self, batch: Tensor) -> Tensor:
        return batch


def load_endless() -> tuple[Any, Any]:
    return Endless(), Evaluator("eval", Endless(), subset_num_batches=2)


class Rollouts:
    """Generates each batch with a policy; a callback sets the policy when training begins."""

    policy: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        states = torch.zeros(BATCH, 3)
        for _ in range(3):
            with torch.no_grad():
                states = states + self.policy(states)
            yield states


def load_rollouts() -> tuple[Any, Any]:
    return Rollouts(), None
