"""Muon, compared with singular value decompositions, and with torch's Muon, AdamW, and SGD."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from runner import ClassificationModel, Trainer, save_checkpoint
from runner.callbacks import InMemoryLogger, LRMonitor
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
def test_orthogonalize_applies_the_polynomial_to_singular_values(shape: tuple[int, int]):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonalize(matrices, 5), u @ torch.diag_embed(s) @ vh)
    assert 0.6 < float(s.min()) <= float(s.max()) < 1.3


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_orthogonalize_equals_torch_bit_for_bit(shape: tuple[int, int]):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    orthogonalized = orthogonalize(matrix.bfloat16()[None], 5)[0]
    assert torch.equal(orthogonalized, _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7))


def test_steps_of_matrices_equal_those_of_torchs_muon():
    """The steps differ by rounding, because torch's Muon computes in bfloat16."""
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
    for name, parameter in ours.named_parameters():
        reference_parameter = theirs.get_parameter(name)
        buffer = optimizers[0].state[parameter]["momentum_buffer"]
        torch.testing.assert_close(buffer, optimizers[1].state[reference_parameter]["momentum_buffer"], rtol=0, atol=0)
        change, reference = parameter.detach() - before[name], reference_parameter.detach() - before[name]
        assert float((change - reference).norm() / reference.norm()) < 0.02


def test_a_convolution_is_stepped_like_a_matrix_with_one_row_per_output_channel():
    conv, linear = nn.Conv2d(2, 6, 3, bias=False), nn.Linear(18, 6, bias=False)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.flatten(1))
    gradient = torch.randn(6, 18)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    conv.weight.grad, linear.weight.grad = gradient.view(6, 2, 3, 3).clone(), gradient.clone()
    for layer in (conv, linear):
        Muon(layer, lr=0.1).step()
    torch.testing.assert_close(conv.weight.flatten(1), linear.weight)


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_other_parameters_are_stepped_as_by_torchs_adamw_or_sgd(rest: str):
    ours, theirs = make_net(), make_net()
    optimizer = Muon(ours, lr=0.0, rest=rest, rest_lr=0.01, rest_weight_decay=0.1)
    _, others = split_parameters(theirs, ("*head*",))
    if rest == "adamw":
        reference: torch.optim.Optimizer = torch.optim.AdamW(others, 0.01, (0.9, 0.95), weight_decay=0.1)
    else:
        reference = torch.optim.SGD(others, 0.01, 0.9, weight_decay=0.1, nesterov=True)
    train(ours, optimizer)
    train(theirs, reference)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=0)


def test_muon_has_one_group_of_matrices_and_one_of_other_parameters():
    assert [len(group["params"]) for group in Muon(make_net(), rest_weight_decay=0.5).param_groups] == [2, 6]


def test_hidden_weights_are_matrices_and_heads_embeddings_norms_and_biases_are_not():
    net = make_net()
    matrices, others = split_parameters(net, ("*head*",))
    names = {parameter: name for name, parameter in net.named_parameters()}
    assert [names[matrix] for matrix in matrices] == ["0.weight", "4.weight"]
    assert len(others) == 6
    gpt = GPT(vocab_size=11, context=8, d_model=8, n_layers=1, n_heads=2)
    gpt.get_parameter("blocks.0.mlp.up.weight").requires_grad_(False)  # it may be unfrozen later
    names = {parameter: name for name, parameter in gpt.named_parameters()}
    matrices, others = split_parameters(gpt, ())  # the tied head is an embedding
    assert {names[matrix] for matrix in matrices} == {
        f"blocks.0.{name}.weight" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    }
    assert len(matrices) + len(others) == len(names)


def test_copied_and_reloaded_optimizers_continue_like_the_original():
    net = make_net()
    optimizer = Muon(net)
    train(net, optimizer)
    copied_net, copied_optimizer = copy.deepcopy((net, optimizer))
    reloaded_net = make_net()
    reloaded_net.load_state_dict(net.state_dict())
    reloaded_optimizer = Muon(reloaded_net, lr=0.5, rest_lr=0.5)
    reloaded_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer)
    train(copied_net, copied_optimizer)
    train(reloaded_net, reloaded_optimizer)
    torch.testing.assert_close(weights(copied_net), weights(net), rtol=0, atol=0)
    torch.testing.assert_close(weights(reloaded_net), weights(net), rtol=0, atol=0)


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_a_run_with_muon_resumes_bit_for_bit(rest: str, tmp_path: Path):
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
    memory = InMemoryLogger()
    optimizers = partial(Muon, lr=0.2, rest_lr=0.01)
    with make_trainer(tmp_path, optimizers=optimizers, callbacks=LRMonitor(), loggers=memory) as trainer:
        trainer.fit()
    rates = [memory.get_timeseries(f"lr-Muon/group{group}")[1][3] for group in (0, 1)]
    assert rates == pytest.approx([0.1, 0.005])


def test_parameters_without_a_gradient_do_not_change():
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
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Muon(make_net(), **arguments)


def test_sharded_weights_are_stepped_like_whole_ones(run_ranks):
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
