"""GPU memory of earlier Trainers in the same process is freed."""

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


class Cycle:
    """Refers to itself, so that only garbage collection frees it, as for the parts of a Trainer."""

    def __init__(self) -> None:
        self.cycle = self


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Turn automatic garbage collection off."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("device", "allocated", "freed"), [("cuda", 1, True), ("cuda", 0, False), ("cpu", 1, False)])
def test_garbage_is_collected_only_if_gpu_memory_is_allocated(
    device: str, allocated: int, freed: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    garbage = weakref.ref(Cycle())
    collect_garbage(torch.device(device))
    assert (garbage() is None) == freed
    gc.collect()


@pytest.mark.gpu
@pytest.mark.usefixtures("no_collection")
def test_a_second_trainer_reuses_the_memory_of_the_first():
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
