from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runner.optim import SGD, AdamW
from runner.optim.factories import make_optimizers


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).double()


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(3):
        optimizer.zero_grad()
        net(
            torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("own", [AdamW, SGD])
def test_all_decay_as_torchs_own_does(own: Any):
    theirs = {AdamW: torch.optim.AdamW, SGD: torch.optim.SGD}[own]
    arguments: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.3}
    ours, reference = make_net(), make_net()
    train(ours, own(ours.parameters(), **arguments))
    train(
        reference,
        theirs(reference.parameters(), **arguments, **({} if own is AdamW else {"momentum": 0.9, "nesterov": True})),
    )
    torch.testing.assert_close(dict(ours.state_dict()), dict(reference.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("own", [AdamW, SGD])
def test_norms_and_biases_are_spared_on_request(own: Any):
    net = make_net()
    (optimizer,) = make_optimizers(
        lambda params: own(params, lr=0.5, weight_decay=0.1, weight_decay_on="matrices"), net
    )
    before = {name: one.detach().clone() for name, one in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    factors = {name: one.detach() / before[name] for name, one in net.named_parameters() if one.ndim > 1}
    assert set(factors) == {"0.weight", "3.weight"}
    for factor in factors.values():
        torch.testing.assert_close(factor, torch.full_like(factor, 1 - 0.5 * 0.1 * (1.9 if own is SGD else 1)))
    for name, parameter in net.named_parameters():
        assert parameter.ndim > 1 or torch.equal(parameter, before[name])


def test_no_group_is_empty():
    assert len(AdamW([nn.Parameter(torch.ones(2))], weight_decay_on="matrices").param_groups) == 1


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="weight_decay_on='norms': must be one of 'all', 'matrices'"):
        SGD(make_net().parameters(), weight_decay_on="norms")
