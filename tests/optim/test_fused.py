"""Fused kernels are used on CUDA; on the CPU, which has them too, the runner leaves the choice to torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
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

Make = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda net: Adam(net.parameters(), lr=0.01),
    "adamw": lambda net: AdamW(net.parameters(), lr=0.01),
    "muon": lambda net: Muon(net, lr=0.01),
    "muon with sgd": lambda net: Muon(net, lr=0.01, rest="sgd"),
}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def fused(optimizer: Optimizer) -> list[Any]:
    return [group.get("fused") for group in optimizer.param_groups]


def train(net: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        net.zero_grad()
        net(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_steps_are_the_same_but_for_rounding(name: str):
    nets, kinds = [], []
    for devices in ((), ("cpu",)):
        net = make_net()
        optimizer = OPTIMIZERS[name](net)
        fuse(optimizer, net, devices)
        train(net, optimizer)
        nets.append(nn.utils.parameters_to_vector(net.parameters()))
        kinds.append(fused(optimizer))
    rest = [None, None] if "muon" in name else [None]
    assert kinds == [rest, [*rest[:-1], True]]
    torch.testing.assert_close(*nets, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_runner_leaves_the_choice_to_torch_on_the_cpu(name: str):
    (optimizer,) = make_optimizers(lambda model: OPTIMIZERS[name](model), make_net())
    assert True not in fused(optimizer)


def test_what_the_user_decided_stays():
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


def test_where_it_would_fail_or_is_unknown_it_is_left():
    class Own(SGD):
        pass

    sparse = nn.Embedding(3, 2, sparse=True)
    whole = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    stepped = make_net()
    started = SGD(stepped.parameters(), momentum=0.9)
    train(stepped, started)
    net = make_net()
    for optimizer, model in (
        (SGD(sparse.parameters()), sparse),
        (SGD(whole.parameters()), whole),
        (started, stepped),
        (Own(net.parameters()), net),
        (RMSprop(net.parameters()), net),
    ):
        before = copy.deepcopy(fused(optimizer))
        fuse(optimizer, model, ("cpu",))
        assert fused(optimizer) == before


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("saved_on", [(), ("cpu",)])
@pytest.mark.parametrize("loaded_on", [(), ("cpu",)])
def test_a_saved_state_is_stepped_by_the_kernels_of_the_run_that_loads_it(name: str, saved_on: Any, loaded_on: Any):
    net = make_net()
    optimizer = OPTIMIZERS[name](net)
    fuse(optimizer, net, saved_on)
    train(net, optimizer)
    other = make_net()
    other.load_state_dict(net.state_dict())
    continued = OPTIMIZERS[name](other)
    fuse(continued, other, loaded_on)
    chosen = fused(continued)
    load_optimizer(continued, copy.deepcopy(optimizer.state_dict()))
    assert fused(continued) == chosen
    train(other, continued)
    train(net, optimizer)
    expected, found = (nn.utils.parameters_to_vector(one.parameters()) for one in (net, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if saved_on == loaded_on else 1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_same_to_the_bit_and_a_gpu_has_fused_kernels(name: str, device: str, tmp_path: Any):
    inputs = torch.randn(32, 4)

    def trainer(**arguments: Any) -> Trainer:
        return Trainer(
            model=ClassificationModel(make_net(), 3),
            train_dataloader=TensorLoader(inputs, torch.arange(32) % 3, batch_size=8, shuffle=True),
            optimizers=partial(lambda model, make: make(model), make=OPTIMIZERS[name]),
            max_duration="2ep",
            device=device,
            progress_bar=False,
            **arguments,
        )

    with trainer() as whole:
        assert (True in fused(whole.state.optimizers[0])) == (device == "cuda")
        whole.fit("1ep")
        whole.save_checkpoint(tmp_path / "one")
        whole.fit("1ep")
    with trainer(resume_path=tmp_path / "one") as resumed:
        resumed.fit()
    weights = [one.state.unwrapped_model.state_dict() for one in (whole, resumed)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
