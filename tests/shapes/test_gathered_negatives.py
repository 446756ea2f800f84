"""A contrastive loss with negatives from all ranks: two ranks train and evaluate like a loop in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import program_of
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD

from runner import Model, Trainer, get_global_rank, get_world_size
from runner.data import TensorLoader

BATCH_SIZE, EPOCHS, TEMPERATURE = 8, 3, 0.2


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(32, 5, generator=generator, dtype=torch.float64)
    return samples, samples + 0.3 * torch.randn(32, 5, generator=generator, dtype=torch.float64)


def make_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Contrastive(Model):
    """Contrasts the queries of this rank with the keys of all ranks; gradients flow through the gathered keys."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def forward(self, batch):
        queries, keys = (normalize(self.network(view), dim=1) for view in batch)
        return queries, keys if get_world_size() == 1 else torch.cat([*all_gather(keys)])

    def loss(self, outputs, batch):
        queries, keys = outputs
        positives = torch.arange(len(queries)) + get_global_rank() * len(queries)
        return cross_entropy(queries @ keys.T / TEMPERATURE, positives)


def fit() -> dict[str, Any]:
    model = Contrastive()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*make_data(), batch_size=BATCH_SIZE, shuffle=False),
        eval_dataloader=TensorLoader(*make_data(), batch_size=BATCH_SIZE, shuffle=False),
        optimizers=lambda parameters: SGD(parameters, lr=0.3, momentum=0.9),
        max_duration=f"{EPOCHS}ep",
        device="cpu",
    ) as trainer:
        result = trainer.fit()
    weights = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
    return {"evaluated": result.metrics["eval/loss"], "weights": weights}


def fit_by_hand() -> dict[str, Any]:
    network = make_network()
    optimizer = SGD(network.parameters(), lr=0.3, momentum=0.9)
    batches = [*zip(*(view.split(BATCH_SIZE) for view in make_data()), strict=True)]

    def loss_of(views: tuple[Tensor, ...]) -> Tensor:
        queries, keys = (normalize(network(view), dim=1) for view in views)
        return cross_entropy(queries @ keys.T / TEMPERATURE, torch.arange(len(queries)))

    for _ in range(EPOCHS):
        for views in batches:
            optimizer.zero_grad()
            loss_of(views).backward()
            optimizer.step()
    with torch.no_grad():
        evaluated = sum(map(loss_of, batches), torch.zeros(())).item() / len(batches)
    weights = [value for parameter in network.parameters() for value in parameter.detach().flatten().tolist()]
    return {"evaluated": evaluated, "weights": weights}


def fit_on_a_rank() -> None:
    Path(f"rank{get_global_rank()}.json").write_text(json.dumps(fit()))


def test_contrastive_training_on_one_rank_equals_a_hand_written_loop():
    fitted, expected = fit(), fit_by_hand()
    assert fitted["weights"] == pytest.approx(expected["weights"], rel=1e-12)
    assert fitted["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-12)


def test_contrastive_training_on_two_ranks_uses_the_negatives_of_both(run_ranks: Any, tmp_path: Path):
    run_ranks(program_of("shapes/test_gathered_negatives", "fit_on_a_rank"), 2)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    expected = fit_by_hand()
    assert ranks[0]["weights"] == pytest.approx(expected["weights"], rel=1e-9)
    assert ranks[0]["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-9)
