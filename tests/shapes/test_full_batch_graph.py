"""Node classification on one graph, which is the only batch, compared with a hand-written loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from runner import Model, Trainer
from runner.callbacks import InMemoryLogger

NODES, FEATURES, CLASSES = 12, 4, 3


def make_graph() -> dict[str, Tensor]:
    """Return features, labels, masks of training and evaluation nodes, and a sparse normalized adjacency matrix."""
    generator = torch.Generator().manual_seed(0)
    edges = (torch.rand(NODES, NODES, generator=generator) < 0.3).float()
    edges = ((edges + edges.T + torch.eye(NODES)) > 0).float()
    labels = torch.randint(0, CLASSES, (NODES,), generator=generator)
    return {
        "features": torch.randn(NODES, FEATURES, generator=generator) + labels[:, None],
        "adjacency": (edges / edges.sum(dim=1, keepdim=True)).to_sparse(),
        "labels": labels,
        "train": torch.arange(NODES) < 8,
        "evaluation": torch.arange(NODES) >= 8,
    }


class Convolutions(nn.Module):
    """Two graph convolutions: adjacency x features x weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, graph: dict[str, Tensor]) -> Tensor:
        hidden = (graph["adjacency"] @ self.first(graph["features"])).relu()
        return graph["adjacency"] @ self.second(hidden)


class NodeClassifier(Model):
    """Computes the loss of training nodes in training mode, and of evaluation nodes in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Convolutions()

    def forward(self, batch):
        return self.network(batch)

    def loss(self, outputs, batch):
        mask = self.mask(batch)
        return cross_entropy(outputs[mask], batch["labels"][mask])

    def mask(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["train" if self.training else "evaluation"]

    def num_samples(self, batch):
        return len(batch["labels"])

    def loss_weight(self, batch):
        return int(self.mask(batch).sum())


def adam(parameters: Any) -> Adam:
    return Adam(parameters, lr=0.05)


def test_a_full_batch_graph_trains_and_evaluates_like_a_hand_written_loop():
    graph, memory, model = make_graph(), InMemoryLogger(), NodeClassifier()
    with Trainer(
        model=model,
        train_dataloader=[graph],
        eval_dataloader=[graph],
        optimizers=adam,
        max_duration="20ep",
        loggers=[memory],
        device="cpu",
    ) as trainer:
        trainer.fit()

    network, losses, evaluations = Convolutions(), [], []
    optimizer = adam(network.parameters())
    for _ in range(20):
        optimizer.zero_grad()
        loss = cross_entropy(network(graph)[graph["train"]], graph["labels"][graph["train"]])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            nodes = graph["evaluation"]
            evaluations.append(cross_entropy(network(graph)[nodes], graph["labels"][nodes]).item())
    assert memory.get_timeseries("loss/train/total")[1] == pytest.approx(losses, rel=1e-6)
    assert memory.get_timeseries("loss/eval/total")[1] == pytest.approx(evaluations, rel=1e-6)
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, model.network.parameters(), network.parameters()))
