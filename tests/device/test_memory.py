"""The memory of a GPU: what earlier Trainers of the process left there is freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from runner import ClassificationModel, Trainer
from runner.data import TensorLoader
from runner.device.memory import collect_garbage


class Knot:
    """Refers to itself, as the parts of a Trainer do to each other."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def rarely_collected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("rarely_collected")
@pytest.mark.parametrize(("device", "allocated", "freed"), [("cuda", 1, True), ("cuda", 0, False), ("cpu", 1, False)])
def test_garbage_is_collected_where_a_gpu_has_some(
    device: str, allocated: int, freed: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    left = weakref.ref(Knot())
    collect_garbage(torch.device(device))
    assert (left() is None) == freed
    gc.collect()


@pytest.mark.gpu
@pytest.mark.usefixtures("rarely_collected")
def test_a_second_trainer_has_the_memory_of_the_first():
    def train() -> int:
        torch.cuda.reset_peak_memory_stats()
        with Trainer(
            model=ClassificationModel(nn.Linear(4096, 4096), 4096),
            train_dataloader=TensorLoader(torch.ones(8, 4096), torch.arange(8), batch_size=8, shuffle=False),
            optimizers=lambda model: torch.optim.Adam(model.parameters()),
            max_duration="2ba",
            device="cuda",
            progress_bar=False,
        ) as trainer:
            trainer.fit()
        return torch.cuda.max_memory_allocated()

    first = train()
    assert train() <= 1.1 * first
