"""A run whose steps are short uses one thread, unless a number of threads is set."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runner import ClassificationModel, Trainer
from runner.config.short_steps import use_one_thread_if_short
from runner.data import TensorLoader
from runner.distributed.threads import with_threads
from runner.models import MLP, ResNet8

LEAN = ("callbacks=none", "algorithms=none", "trainer.max_duration=1ba", "hydra.run.dir=run")
BIG = ("model.module.hidden=[4000]", "data.batch_size=1200")


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3  # restored after the job
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "threads"),
    [
        ((), 1),
        (BIG, 3),
        pytest.param(("launch.threads=2",), 2, marks=pytest.mark.slow),
        ((*BIG, "launch.threads=2"), 2),
    ],
)
def test_a_run_of_short_steps_uses_one_thread(
    arguments: tuple[str, ...], threads: int, run_here: Callable[..., object], tmp_path: Path
):
    run_here("model=mlp", *LEAN, *arguments, code=0)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["threads"] == threads


def test_omp_num_threads_overrides_the_single_thread(
    run_here: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run_here("model=mlp", *LEAN, code=0)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["threads"] == 3


def test_a_batch_that_does_not_fit_the_model_changes_no_threads(tmp_path: Path):
    loader = TensorLoader(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), batch_size=4, shuffle=False)
    model = ClassificationModel(ResNet8(), 10)
    with Trainer(model=model, train_dataloader=loader, max_duration="1ba", run_dir=tmp_path) as trainer:
        use_one_thread_if_short(trainer.state)
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("samples", "ranks", "threads"),
    [(1000, 1, 1), (100_000, 1, 3), (200_000, 4, 3), (200_000, 5, 1)],
)
def test_operations_are_counted_for_the_batch_of_one_rank(samples: int, ranks: int, threads: int, tmp_path: Path):
    """A step takes 6 operations per weight (1,000) and sample; below 3e8 it is short."""
    data = torch.zeros(1, 100).expand(samples, 100), torch.zeros(1, dtype=torch.int64).expand(samples)
    loader = TensorLoader(*data, batch_size=samples, shuffle=False, rank=0, world_size=ranks)
    model = ClassificationModel(MLP(100, (), 10), 10)
    with (
        Trainer(model=model, train_dataloader=loader, max_duration="1ba", run_dir=tmp_path) as trainer,
        with_threads(None, is_requested=False),
    ):
        use_one_thread_if_short(trainer.state)
        assert torch.get_num_threads() == threads
