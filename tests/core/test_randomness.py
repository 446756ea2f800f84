from __future__ import annotations

import copy
import itertools
import os
import random
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch
import torchmetrics
from torch import nn

from runner import Algorithm, Callback, ClassificationModel, Trainer, stream_seed
from runner.algorithms import EMA, BatchAugment, MixUp
from runner.callbacks import InMemoryLogger
from runner.core.randomness import ForwardStream, _mix
from runner.data import DatasetLoader, TensorLoader
from runner.device.numerics import set_numerics
from runner.optim.schedulers import cosine_annealing


class Model(ClassificationModel):
    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(
                nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)), 3
            )


class Draws(Callback):
    """Draws from every global generator at every event, and leaves them elsewhere."""

    def __init__(self):
        self.drawn: list[float] = []

    def run_event(self, event, state, logger):
        self.drawn.append(float(torch.rand(len(self.drawn) % 3 + 1).sum()))
        numpy.random.rand(2)
        random.random()


class Noisy(torch.utils.data.Dataset):
    """Augments from the three global generators."""

    def __len__(self):
        return 38

    def __getitem__(self, index):
        noise = torch.randn(1, 4, 4) + random.random() + float(numpy.random.rand())
        return index + noise, index % 3


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(38, 1, 4, 4, generator=torch.Generator().manual_seed(3)), torch.arange(38) % 3


LOADERS: dict[str, Any] = {
    "tensors": lambda: TensorLoader(*make_data(), batch_size=8, shuffle=True),
    "transform": lambda: TensorLoader(
        *make_data(), batch_size=8, shuffle=True, transform=lambda batch: (batch[0] + torch.randn(1), batch[1])
    ),
    "dataset": lambda: DatasetLoader(Noisy(), batch_size=8, shuffle=True),
    "torch": lambda: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*make_data()), batch_size=8, shuffle=True
    ),
}


def run(loader: str = "tensors", **arguments: Any) -> dict[str, Any]:
    """All numbers that a run gives."""
    logged = InMemoryLogger()
    with Trainer(
        **{
            "model": Model(),
            "train_dataloader": LOADERS[loader](),
            "eval_dataloader": TensorLoader(*make_data(), batch_size=8, shuffle=False),
            "optimizers": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            "schedulers": cosine_annealing(),
            "algorithms": [MixUp(), EMA("5ba"), BatchAugment(flip="random")],
            "max_duration": "2ep",
            "loggers": [logged],
            "device": "cpu",
            **arguments,
        }
    ) as trainer:
        trainer.fit()
    values = {key: [(int(now.batch), value) for now, value in points] for key, points in logged.data.items()}
    weights = {name: value.clone() for name, value in trainer.state.unwrapped_model.state_dict().items()}
    return {"weights": weights, "logged": values}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    same = all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    return same and one["logged"] == other["logged"]


@pytest.mark.parametrize("loader", LOADERS)
def test_equal_runs_are_equal_to_the_bit(loader: str):
    torch.manual_seed(1)
    first = run(loader)
    torch.manual_seed(2)  # what was drawn before a run does not matter
    assert equal(run(loader), first)
    assert not equal(run(loader, seed=1), first)


@pytest.mark.parametrize("arguments", [{}, {"grad_accum": 3}, {"microbatch_size": "auto"}], ids=str)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_callback_that_draws_changes_no_number(loader: str, arguments: dict[str, Any]):
    draws = Draws()
    assert equal(run(loader, callbacks=[draws], **arguments), run(loader, **arguments))
    assert len(draws.drawn) > 100


class FrozenNorm(Algorithm):
    """Trains with the running statistics of batch norm."""

    def fit_start(self, state, logger):
        state.unwrapped_model.get_submodule("module.2").eval()


@pytest.mark.parametrize("algorithms", [[], [FrozenNorm()], [MixUp(), EMA("5ba")]], ids=["plain", "frozen", "averaged"])
def test_evaluations_change_no_training_number(algorithms: list[Algorithm]):
    never = run(eval_interval=0, algorithms=copy.deepcopy(algorithms))
    often = run(eval_interval="1ba", algorithms=copy.deepcopy(algorithms))
    for name in never["weights"]:
        assert torch.equal(never["weights"][name], often["weights"][name])
    for key in never["logged"]:
        assert never["logged"][key] == often["logged"][key]


def test_dropout_differs_between_batches_and_microbatches_and_seeds():
    class Masks(Callback):
        def __init__(self):
            self.masks: list[bytes] = []

        def init(self, state, logger):
            state.unwrapped_model.get_submodule("module.3").register_forward_hook(self.keep)

        def keep(self, module, inputs, output):
            if module.training:
                self.masks.append((output[:4] != 0).numpy().tobytes())

    everything = []
    for seed in range(3):
        masks = Masks()
        run(callbacks=[masks], grad_accum=2, seed=seed)
        everything += masks.masks
    assert len(set(everything)) == len(everything) == 3 * 2 * 10


class TestStreamSeed:
    def test_it_is_the_same_everywhere(self):
        assert _mix(0) == 0xE220A8397B1DCDAF  # SplitMix64's first number for the state 0, as published
        # Were these to change, no run could be resumed or repeated.
        assert stream_seed(0, "order") == 1152760118607444429
        assert stream_seed(0, "order", 0) == 2574158892610469762
        assert stream_seed(123, "mixup", 5, 7) == 5896857467563377564

    def test_every_argument_matters_and_so_does_their_order(self):
        seeds = [
            stream_seed(seed, name, *counters)
            for seed in (0, 1, 10)
            for name in ("a", "b", "0", "1")
            for counters in [(), *itertools.product(range(30), repeat=1), *itertools.product(range(30), repeat=2)]
        ]
        assert len(set(seeds)) == len(seeds)
        assert all(0 <= seed < 2**63 for seed in seeds)

    def test_it_is_even_over_bits(self):
        seeds = [stream_seed(0, "x", batch) for batch in range(4096)]
        for bit in range(63):
            assert 1800 < sum(seed >> bit & 1 for seed in seeds) < 2300


class TestForwardStream:
    def test_it_depends_on_the_batch_and_microbatch_alone(self):
        stream = ForwardStream(0, torch.device("cpu"))

        def draw(batch: int, microbatch: int) -> list[float]:
            stream.start(batch, microbatch)
            return torch.rand(4).tolist()

        first = {place: draw(*place) for place in itertools.product(range(50), range(4))}
        assert {place: draw(*place) for place in reversed(first)} == first
        assert len({tuple(values) for values in first.values()}) == len(first)

    def test_seeds_of_ranks_and_names_give_other_draws(self):
        drawn = set()
        for seed, name in itertools.product(range(8), ("forward", "dataloader")):
            ForwardStream(seed, torch.device("cpu"), name).start(0, 0)
            drawn.add(float(torch.rand(())))
        assert len(drawn) == 16

    def test_consecutive_batches_are_uncorrelated(self):
        stream = ForwardStream(0, torch.device("cpu"))
        rows = []
        for batch in range(200):
            stream.start(batch, 0)
            rows.append(torch.rand(500))
        correlations = torch.corrcoef(torch.stack(rows)) - torch.eye(200)
        assert float(correlations.abs().max()) < 0.25 and abs(float(correlations.mean())) < 0.002


@pytest.mark.parametrize(("before", "after"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_any_run_prepares_for_a_deterministic_one_after_it(monkeypatch, before: str | None, after: str):
    name = "CUBLAS_WORKSPACE_CONFIG"  # which torch reads once in a process
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    set_numerics(deterministic=False)()
    assert os.environ[name] == after


def test_deterministic_runs_refuse_what_is_not_and_restore_what_was():
    class Puts(ClassificationModel):
        """Uses an operation that has no deterministic form."""

        def loss(self, outputs, batch):
            index = torch.zeros(2, dtype=torch.int64)
            outputs.detach().clone().put_(index, torch.tensor([1.0, 2.0]))
            return super().loss(outputs, batch)

    arguments: dict[str, Any] = {"algorithms": [], "max_duration": "1ba", "eval_dataloader": None}
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    run(model=Puts(net, 3), **arguments)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        run(model=Puts(net, 3), deterministic=True, **arguments)
    assert not torch.are_deterministic_algorithms_enabled()
    inside = []

    class Look(Callback):
        def batch_end(self, state, logger):
            inside.append(torch.are_deterministic_algorithms_enabled())

    first = run(deterministic=True, callbacks=[Look()])
    assert all(inside) and not torch.are_deterministic_algorithms_enabled()
    assert equal(first, run())
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        run(deterministic=True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_metrics_are_no_part_of_the_streams():
    class Sampling(torchmetrics.MeanMetric):
        """Draws when it is updated."""

        def update(self, *values):
            torch.rand(3)
            super().update(torch.ones(()))

    class Measured(Model):
        def metrics(self, train):
            return {"sampling": Sampling()}

    measured, plain = run(model=Measured()), run()
    for name in plain["weights"]:
        assert torch.equal(measured["weights"][name], plain["weights"][name])


@pytest.mark.gpu
def test_a_stream_is_made_before_anything_is_on_the_gpu():
    program = "import torch, runner.core.randomness as it; it.ForwardStream(0, torch.device('cuda')).start(0, 0)"
    subprocess.run([sys.executable, "-c", program], check=True)
