"""The runner chooses fused kernels on CUDA, and leaves the choice to torch on the CPU, which also has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from runner import ClassificationModel, Trainer
from runner.data import TensorLoader
from runner.optim import Muon, ParamGroups
from runner.optim.factories import make_optimizers
from runner.optim.fused import fuse, load_optimizer

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda net: Adam(net.parameters(), lr=0.01),
    "adamw": lambda net: AdamW(net.parameters(), lr=0.01),
    "muon": lambda net: Muon(net, lr=0.01),
    "muon with sgd": lambda net: Muon(net, lr=0.01, rest="sgd"),
}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def fused(optimizer: Optimizer) -> list[bool | None]:
    """Return the setting `fused` of each parameter group."""
    return [group.get("fused") for group in optimizer.param_groups]


def train(net: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        net.zero_grad()
        net(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_and_other_steps_agree_up_to_rounding(name: str):
    weights = []
    for devices, setting in (((), None), (("cpu",), True)):
        net = make_net()
        optimizer = OPTIMIZERS[name](net)
        fuse(optimizer, net, devices)
        assert fused(optimizer) == ([None, setting] if "muon" in name else [setting])
        train(net, optimizer)
        weights.append(nn.utils.parameters_to_vector(net.parameters()))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_made_on_the_cpu_are_not_fused(name: str):
    (optimizer,) = make_optimizers(lambda model: OPTIMIZERS[name](model), make_net())
    assert True not in fused(optimizer)


def test_the_users_choice_of_kernels_is_kept():
    net = make_net()
    choices: list[dict[str, Any]] = [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}]
    for options in choices:
        optimizer = Adam(net.parameters(), **options)
        before = fused(optimizer)
        fuse(optimizer, net, ("cpu",))
        assert fused(optimizer) == before
    optimizer = ParamGroups(AdamW, {"biases": {"max_ndim": 1, "fused": False}})(net)
    fuse(optimizer, net, ("cpu",))
    assert fused(optimizer) == [True, False]


def test_optimizers_that_are_sparse_complex_already_stepped_or_unknown_are_not_fused():
    class Subclass(SGD):
        pass

    sparse = nn.Embedding(3, 2, sparse=True)
    complex_weights = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    net = make_net()
    stepped = SGD(net.parameters(), momentum=0.9)
    train(net, stepped)
    for optimizer, model in (
        (SGD(sparse.parameters()), sparse),
        (SGD(complex_weights.parameters()), complex_weights),
        (stepped, net),
        (Subclass(net.parameters()), net),
        (RMSprop(net.parameters()), net),
    ):
        before = fused(optimizer)
        fuse(optimizer, model, ("cpu",))
        assert fused(optimizer) == before


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("saved_on", [(), ("cpu",)])
@pytest.mark.parametrize("loaded_on", [(), ("cpu",)])
def test_an_optimizer_with_a_loaded_state_keeps_its_kernels(name: str, saved_on: Any, loaded_on: Any):
    net = make_net()
    optimizer = OPTIMIZERS[name](net)
    fuse(optimizer, net, saved_on)
    train(net, optimizer)
    loaded_net = make_net()
    loaded_net.load_state_dict(net.state_dict())
    loaded_optimizer = OPTIMIZERS[name](loaded_net)
    fuse(loaded_optimizer, loaded_net, loaded_on)
    before = fused(loaded_optimizer)
    load_optimizer(loaded_optimizer, copy.deepcopy(optimizer.state_dict()))
    assert fused(loaded_optimizer) == before
    train(loaded_net, loaded_optimizer)
    train(net, optimizer)
    tolerance = 0 if saved_on == loaded_on else 1e-6
    torch.testing.assert_close(loaded_net.state_dict(), net.state_dict(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_uses_fused_kernels_on_a_gpu_only_and_resumes_bit_for_bit(name: str, device: str, tmp_path: Path):
    inputs = torch.randn(32, 4)

    def make_trainer(**arguments: Any) -> Trainer:
        return Trainer(
            model=ClassificationModel(make_net(), 3),
            train_dataloader=TensorLoader(inputs, torch.arange(32) % 3, batch_size=8, shuffle=True),
            optimizers=partial(lambda model, make: make(model), make=OPTIMIZERS[name]),
            max_duration="2ep",
            device=device,
            progress_bar=False,
            **arguments,
        )

    with make_trainer() as whole:
        assert (True in fused(whole.state.optimizers[0])) == (device == "cuda")
        whole.fit("1ep")
        whole.save_checkpoint(tmp_path / "saved")
        whole.fit("1ep")
    with make_trainer(resume_path=tmp_path / "saved") as resumed:
        resumed.fit()
    weights = [trainer.state.unwrapped_model.state_dict() for trainer in (whole, resumed)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
