from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from runner import Callback, ClassificationModel, Trainer, save_checkpoint
from runner.callbacks import LRMonitor
from runner.data import TensorLoader
from runner.models import GPT
from runner.optim import Muon
from runner.optim.muon import COEFFICIENTS, orthogonalize, split_parameters
from runner.optim.schedulers import linear


def make_net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.ReLU()]
    net = nn.Sequential(*layers)
    net.add_module("head", nn.Linear(6, 3))
    return net.to(dtype)


def make_trainer(folder: Path, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(24, 1, 4, 4, generator=generator, dtype=torch.float64)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(make_net(), 3),
        "train_dataloader": TensorLoader(images, torch.arange(24) % 3, batch_size=8, shuffle=True),
        "optimizers": partial(Muon, lr=0.05, weight_decay=0.1),
        "schedulers": linear(t_max="6ba"),
        "max_duration": "6ba",
        "device": "cpu",
        "run_dir": folder,
    }
    return Trainer(**(defaults | arguments))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(5, 1, 4, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        net(inputs.to(next(net.parameters()).dtype)).square().sum().backward()
        optimizer.step()


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_singular_values_go_through_the_polynomial(shape: tuple[int, int]):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonalize(matrices, 5), u @ torch.diag_embed(s) @ vh)
    assert 0.6 < float(s.min()) <= float(s.max()) < 1.3


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_orthogonalizing_is_torchs_to_the_bit(shape: tuple[int, int]):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = orthogonalize(matrix.bfloat16()[None], 5)[0]
    assert torch.equal(ours, _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7))


def test_matrices_are_stepped_as_by_torch():
    """Torch computes in bfloat16, so a step differs by the rounding of that."""
    ours, theirs = (nn.Sequential(nn.Linear(16, 12, bias=False), nn.Linear(5, 20, bias=False)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    before = weights(ours)
    optimizers = [
        Muon(ours, lr=0.03, momentum=0.9, weight_decay=0.2),
        torch.optim.Muon(theirs.parameters(), lr=0.03, momentum=0.9, weight_decay=0.2),
    ]
    for seed in range(4):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            generator = torch.Generator().manual_seed(seed)
            for parameter in net.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        buffers = (optimizer.state[p]["momentum_buffer"] for optimizer, p in zip(optimizers, (one, other), strict=True))
        torch.testing.assert_close(*buffers, rtol=0, atol=0)
    for name, its in weights(ours).items():
        change, reference = its - before[name], theirs.state_dict()[name] - before[name]
        assert float((change - reference).norm() / reference.norm()) < 0.02


def test_a_convolution_is_stepped_as_the_matrix_that_it_is():
    conv, linear = nn.Conv2d(2, 6, 3, bias=False), nn.Linear(18, 6, bias=False)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.flatten(1))
    gradient = torch.randn(6, 18)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    conv.weight.grad, linear.weight.grad = gradient.view(6, 2, 3, 3).clone(), gradient.clone()
    for one in (conv, linear):
        Muon(one, lr=0.1).step()
    torch.testing.assert_close(conv.weight.flatten(1), linear.weight)


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_the_rest_is_stepped_by_torchs_own(rest: str):
    ours, theirs = make_net(), make_net()
    common: dict[str, Any] = {"rest": rest, "rest_lr": 0.01, "rest_weight_decay": 0.1}
    optimizer = Muon(ours, lr=0.0, **common)
    _, others = split_parameters(theirs, ("*head*",))
    if rest == "adamw":
        reference: torch.optim.Optimizer = torch.optim.AdamW(others, 0.01, (0.9, 0.95), weight_decay=0.1)
    else:
        reference = torch.optim.SGD(others, 0.01, 0.9, weight_decay=0.1, nesterov=True)
    train(ours, optimizer)
    train(theirs, reference)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=0)


def test_by_default_the_rest_is_one_group():
    assert [len(group["params"]) for group in Muon(make_net(), rest_weight_decay=0.5).param_groups] == [2, 6]


def test_what_is_a_matrix():
    net = make_net()
    matrices, others = split_parameters(net, ("*head*",))
    assert [id(one) for one in matrices] == [id(net[0].weight), id(net[4].weight)]
    assert len(others) == 6
    gpt = GPT(vocab_size=11, context=8, d_model=8, n_layers=1, n_heads=2)
    gpt.get_parameter("blocks.0.mlp.up.weight").requires_grad_(False)  # it may be unfrozen later
    names = {id(one): name for name, one in gpt.named_parameters()}
    matrices, others = split_parameters(gpt, ())  # the tied head is an embedding
    assert {names[id(one)] for one in matrices} == {
        f"blocks.0.{name}.weight" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    }
    assert len(matrices) + len(others) == len(names)


def test_a_copy_and_a_reloaded_state_go_on_as_the_original():
    net = make_net()
    optimizer = Muon(net)
    train(net, optimizer)
    twin, twins = copy.deepcopy((net, optimizer))
    fresh = make_net()
    fresh.load_state_dict(net.state_dict())
    reloaded = Muon(fresh, lr=0.5, rest_lr=0.5)
    reloaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((net, optimizer), (twin, twins), (fresh, reloaded)):
        train(one, its)
    torch.testing.assert_close(weights(twin), weights(net), rtol=0, atol=0)
    torch.testing.assert_close(weights(fresh), weights(net), rtol=0, atol=0)


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_resume(rest: str, tmp_path: Path):
    optimizers = partial(Muon, lr=0.05, rest=rest, rest_lr=0.01)
    with make_trainer(tmp_path, optimizers=optimizers) as whole:
        whole.fit()
    with make_trainer(tmp_path, optimizers=optimizers) as first:
        first.fit(duration="4ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    with make_trainer(tmp_path, optimizers=optimizers, resume_path=tmp_path / "checkpoint") as second:
        second.fit()
    assert second.state.timestamp.batch == 6
    torch.testing.assert_close(weights(second.state.model), weights(whole.state.model), rtol=0, atol=0)


def test_schedules_multiply_both_rates(tmp_path: Path):
    class Rates(Callback):
        def __init__(self):
            self.seen: list[Any] = []

        def batch_end(self, state, logger):
            self.seen.append(dict(monitor._rates))

    rates, monitor = Rates(), LRMonitor()
    with make_trainer(tmp_path, optimizers=partial(Muon, lr=0.2, rest_lr=0.01), callbacks=[monitor, rates]) as trainer:
        trainer.fit()
    assert rates.seen[3] == pytest.approx({"lr-Muon/group0": 0.1, "lr-Muon/group1": 0.005})


def test_parameters_without_a_gradient_stay(tmp_path: Path):
    net = make_net()
    optimizer, before = Muon(net, weight_decay=1.0, rest_weight_decay=1.0), weights(net)
    optimizer.step()
    torch.testing.assert_close(weights(net), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"rest_lr": -1.0}, "rest_lr=-1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"exclude": "head"}, "exclude='head': must be a list"),
        ({"rest": "lion"}, "rest='lion': must be one of"),
        ({"exclude": ["*"]}, "leaves no matrix to Muon"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Muon(make_net(), **arguments)


def test_sharded_weights_are_stepped_as_whole_ones(run_ranks):
    def program():
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        from runner.optim import Muon

        dist.init_process_group("gloo")

        def make() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Conv2d(1, 5, 3), nn.Flatten(), nn.Linear(20, 3), nn.Linear(3, 7))

        def train(net, optimizer):
            for seed in range(3):
                inputs = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
                optimizer.zero_grad()
                net(inputs).square().sum().backward()
                optimizer.step()

        whole, sharded = make(), make()
        fully_shard(sharded)
        train(whole, Muon(whole, weight_decay=0.1))
        train(sharded, Muon(sharded, weight_decay=0.1))
        for ours, theirs in zip(sharded.state_dict().values(), whole.state_dict().values(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
        dist.destroy_process_group()

    run_ranks(program)
