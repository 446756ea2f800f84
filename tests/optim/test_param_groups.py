"""Parameter groups made by rules, compared with groups written by hand."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from runner.optim import Muon, ParamGroups
from runner.optim.factories import make_optimizers, make_schedulers
from runner.optim.param_groups import check_groups
from runner.optim.schedulers import constant
from runner.timing.time import Progress, Time, Timestamp

NO_DECAY = {"no_decay": {"max_ndim": 1, "weight_decay": 0.0}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Net(nn.Module):
    """An embedding, three blocks, a norm and a head, as in timm's and transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.arange(5)).square().sum().backward()
        optimizer.step()
    return dict(net.state_dict())


def groups_of(net: nn.Module, factory: Any, rules: Any) -> dict[str, dict[str, Any]]:
    """Return the groups by name, with names instead of parameters."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    (optimizer,) = make_optimizers(ParamGroups(factory, rules), net)
    return {
        group["name"]: group | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    }


def rates_of(net: nn.Module, rules: Any) -> dict[str, float]:
    """Return the learning rate of each parameter by name, with `SGD`."""
    return {name: group["lr"] for group in groups_of(net, SGD, rules).values() for name in group["params"]}


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.3)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3)


@pytest.mark.parametrize("factory", [SGD, ADAMW])
def test_norms_and_biases_without_weight_decay_train_as_in_groups_written_by_hand(factory: Any):
    ours, theirs = make_net(), make_net()
    by_hand: list[dict[str, Any]] = [
        {"params": [parameter for parameter in theirs.parameters() if parameter.ndim > 1]},
        {"params": [parameter for parameter in theirs.parameters() if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    expected = train(theirs, factory(by_hand))
    torch.testing.assert_close(train(ours, ParamGroups(factory, NO_DECAY)(ours)), expected, rtol=0, atol=0)


def test_all_rules_that_select_a_parameter_apply():
    rules = NO_DECAY | {
        "backbone": {"names": ["embed*", "blocks.*"], "lr_scale": 0.5},
        "norms": {"modules": "LayerNorm", "momentum": 0.0, "lr": 0.4},
    }
    groups = groups_of(make_net(), SGD, rules)
    assert {name: (group["lr"], group["weight_decay"], group["momentum"]) for name, group in groups.items()} == {
        "default": (0.1, 0.3, 0.9),
        "backbone": (0.05, 0.3, 0.9),
        "no_decay": (0.1, 0.0, 0.9),
        "no_decay+norms": (0.4, 0.0, 0.0),
        "no_decay+backbone": (0.05, 0.0, 0.9),
        "no_decay+backbone+norms": (0.2, 0.0, 0.0),
    }
    assert groups["default"]["params"] == ["head.weight"] and groups["no_decay"]["params"] == ["head.bias"]
    assert groups["no_decay+norms"]["params"] == ["norm.weight", "norm.bias"]


def test_layer_decay_lowers_the_rate_of_each_layer_below_the_head():
    rates = rates_of(make_net(), {"layers": {"layer_decay": 0.5}})
    assert rates["head.weight"] == rates["norm.weight"] == 0.1
    assert [rates[f"blocks.{n}.linear.weight"] for n in (2, 1, 0)] == pytest.approx([0.05, 0.025, 0.0125])
    assert rates["embed.weight"] == pytest.approx(0.00625)


def test_layer_decay_ignores_a_number_that_all_names_share():
    net = nn.ModuleDict({"inner": nn.Sequential(make_net(), nn.Linear(3, 3))})
    rates = rates_of(net, {"layers": {"names": "inner.0.*", "layer_decay": 0.5}})
    assert rates["inner.1.weight"] == 0.1
    assert rates["inner.0.embed.weight"] == pytest.approx(0.00625)


MUON = partial(Muon, rest_weight_decay=0.5, weight_decay=0.5)


def test_splitting_the_groups_of_muon_does_not_change_the_steps():
    whole, split = make_net(), make_net()
    unchanged = {"bottom": {"names": "blocks.0.*", "lr_scale": 1.0}}
    expected = train(whole, MUON(whole))
    torch.testing.assert_close(train(split, ParamGroups(MUON, unchanged)(split)), expected, rtol=0, atol=0)


def test_rules_for_muon_select_among_matrices_and_other_parameters():
    net = make_net()
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer = ParamGroups(partial(MUON, lr=0.0, rest_lr=0.01, rest="sgd"), NO_DECAY)(net)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # zero gradients leave only weight decay, which lr=0 disables for matrices
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name]) == (parameter.ndim < 2 or name.startswith("blocks")), name


def test_the_groups_of_muon_can_be_saved_and_loaded():
    net, loaded_net = make_net(), make_net()
    optimizer, loaded_optimizer = ParamGroups(Muon, NO_DECAY)(net), ParamGroups(Muon, NO_DECAY)(loaded_net)
    train(net, optimizer)
    loaded_net.load_state_dict(net.state_dict())
    loaded_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors
    torch.testing.assert_close(train(loaded_net, loaded_optimizer), train(net, optimizer), rtol=0, atol=0)


def test_schedules_multiply_the_rate_of_each_group():
    net = make_net()
    optimizers = make_optimizers(ParamGroups(SGD, {"head": {"names": "head.*", "lr_scale": 10}}), net)
    progress = Progress(Timestamp(), Time(2, "ep"), 5)
    (rates,), _ = make_schedulers(constant(0.5), optimizers, progress, 1.0, False)
    rates.step(progress)
    assert [group["lr"] for group in optimizers[0].param_groups] == pytest.approx([0.05, 0.5])


def test_a_tied_weight_is_selected_by_either_name():
    net = make_net()
    net.tied = nn.Linear(4, 5, bias=False).double()
    net.tied.weight = net.embed.weight
    assert groups_of(net, SGD, {"x": {"names": "tied.*", "lr": 1.0}})["x"]["params"] == ["embed.weight"]


def test_the_last_matching_pattern_counts_and_an_exclamation_mark_excludes():
    net = make_net()
    rule = {"names": ["*", "!blocks.*", "blocks.2.*"], "lr_scale": 0.1}
    groups = groups_of(net, SGD, {"x": rule})
    expected = [name for name, _ in net.named_parameters() if name.startswith(("blocks.0.", "blocks.1."))]
    assert groups["default"]["params"] == expected
    with pytest.raises(ValueError, match=r"names='!hed.weight': matches no parameter; .*; near: head.weight"):
        groups_of(net, SGD, {"x": {"names": ["*", "!hed.weight"], "lr": 1}})


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ([], TypeError, "param_groups=[]: must be rules by name"),
        ({"a": 3}, TypeError, "param_groups.a=3: must be a rule"),
        ({"a": {"names": "head.*"}}, ValueError, "param_groups.a={'names': 'head.*'}: changes nothing"),
        ({"a": {"names": 3, "lr": 1}}, TypeError, "param_groups.a.names=3: must be a name or a list"),
        ({"a": {"max_ndim": -1, "lr": 1}}, ValueError, "param_groups.a.max_ndim=-1"),
        ({"a": {"lr_scale": "x"}}, TypeError, "param_groups.a.lr_scale='x': must be a number"),
        ({"a": {"layer_decay": 2}}, ValueError, "param_groups.a.layer_decay=2: must be above 0 and at most 1"),
        ({"a": {"names": "head.*", "layer_decay": 0.5}}, ValueError, "param_groups.a.layer_decay=0.5: no module here"),
        (
            {"a": {"names": "hed.*", "lr": 1}},
            ValueError,
            "param_groups.a.names='hed.*': matches no parameter; parameters are embed.weight, ",
        ),
        (
            {"a": {"names": ["head.*", "hed.*"], "lr": 1}},
            ValueError,
            "param_groups.a.names='hed.*': matches no parameter; parameters are embed.weight, ",
        ),
        (
            {"a": {"names": "embed.*", "max_ndim": 0, "lr": 1}},
            ValueError,
            "param_groups.a.names=['embed.*'], param_groups.a.max_ndim=0: selects no parameter; parameters are ",
        ),
        (
            {"a": {"names": "*", "lr_scale": 0}},
            ValueError,
            "param_groups.a: every parameter has a learning rate of 0, so that nothing trains; leave some out",
        ),
        (
            {"a": {"modules": ["BatchNorm2d"], "lr": 1}},
            ValueError,
            "param_groups.a.modules='BatchNorm2d': matches no parameter; classes are Embedding, ",
        ),
        (
            {"a": {"weight_dekay": 0}},
            ValueError,
            "param_groups.a.weight_dekay=0: SGD has no such setting; did you mean 'weight_decay'?",
        ),
        ({"a": {"params": []}}, ValueError, "param_groups.a.params=[]: SGD has no such setting"),
        ({"a": {"lr": -1}}, ValueError, "param_groups.a.lr=-1: must be a finite number of at least 0"),
        ({"a": {"lr": "x"}}, TypeError, "param_groups.a.lr='x': must be a number"),
        ({"a": {"nesterov": 1}}, TypeError, "param_groups.a.nesterov=1: must be of the same kind as False"),
    ],
)
def test_wrong_rules_are_named_in_the_error(rules: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=re.escape(message)):
        ParamGroups(SGD, rules)(make_net())


def test_rules_also_select_frozen_parameters():
    net = make_net()
    for parameter in net.parameters():
        parameter.requires_grad_(parameter.ndim > 1)  # as with LoRA, which freezes norms and biases
    groups = {group["name"]: group["params"] for group in ParamGroups(SGD, NO_DECAY)(net).param_groups}
    assert groups["no_decay"] and not any(parameter.requires_grad for parameter in groups["no_decay"])
    with pytest.raises(ValueError, match="every parameter has a learning rate of 0"):
        ParamGroups(SGD, {"a": {"max_ndim": 1, "weight_decay": 0.0}, "b": {"names": "*.weight", "lr": 0.0}})(net)


def test_a_resumed_run_with_other_parameter_groups_is_refused():
    net = make_net()
    saved = ParamGroups(SGD, NO_DECAY)(net).state_dict()
    check_groups(ParamGroups(SGD, NO_DECAY)(net), saved)
    with pytest.raises(ValueError, match=r"from default \(5\), no_decay \(12\) tensors to 0 \(17\): a run cannot be"):
        check_groups(SGD(net.parameters()), saved)
