"""`replace_modules`: which modules are replaced, what the new modules inherit, and the parameters of optimizers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from runner import Algorithm, ClassificationModel, Trainer, replace_modules
from runner.libraries.torchvision import import_torchvision
from runner.models import GPT, MLP, ResNet8


class LinearSubclass(nn.Linear):
    """A linear layer of another exact type."""


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.extra is None else self.inner(self.extra(x))


def copy_of(linear: nn.Module, index: int = 0) -> nn.Linear:
    assert isinstance(linear, nn.Linear)
    copied = nn.Linear(linear.in_features, linear.out_features)
    copied.load_state_dict(linear.state_dict())
    return copied


def wrap(module: nn.Module, index: int = 0) -> Wrapped:
    return Wrapped(module)


def test_modules_are_replaced_by_exact_type_and_numbered_in_order():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3), nn.ReLU()), LinearSubclass(3, 3))
    before = [model[0], model[1][0]]
    calls = []
    x = torch.randn(4, 2)
    expected = model(x)

    def policy(module: nn.Module, index: int) -> nn.Module:
        calls.append((module, index))
        return copy_of(module)

    replaced = replace_modules(model, {nn.Linear: policy})
    assert calls == [(before[0], 0), (before[1], 1)]
    assert replaced == {"0": model[0], "1.0": model[1][0]}
    assert model[0] is not before[0]
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def test_a_selector_may_be_a_predicate_and_a_policy_may_return_none():
    model: Any = nn.Sequential(nn.Linear(2, 2), LinearSubclass(2, 2), nn.Linear(2, 2))
    first, second, third = model
    replaced = replace_modules(model, {is_linear: lambda module, index: None if index == 1 else copy_of(module)})
    assert [*replaced] == ["0", "2"]
    assert model[0] is not first
    assert model[1] is second
    assert model[2] is not third


def test_only_the_first_matching_selector_applies():
    model: Any = nn.Sequential(nn.Linear(2, 2))
    replace_modules(model, {nn.Linear: lambda module, index: None, is_linear: wrap})
    assert type(model[0]) is nn.Linear


def test_a_shared_module_has_a_shared_replacement():
    shared = nn.Linear(2, 2)
    model: Any = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(shared))
    replaced = replace_modules(model, {nn.Linear: copy_of})
    assert [*replaced] == ["0"]
    assert model[0] is model[2] is model[3][0] is replaced["0"]
    assert model[0] is not shared


@pytest.mark.parametrize("recurse", [False, True])
def test_a_replacement_may_contain_the_replaced_module(recurse: bool):
    shared = nn.Linear(2, 2)
    model: Any = nn.Sequential(shared, shared)
    replace_modules(model, {nn.Linear: wrap}, recurse_on_replaced=recurse)
    assert model[0] is model[1]
    assert model[0].inner is shared


@pytest.mark.parametrize("recurse", [False, True])
def test_submodules_of_replacements_are_replaced_only_with_recurse_on_replaced(recurse: bool):
    def build(module: nn.Module, index: int) -> nn.Module:
        return nn.Sequential(LinearSubclass(2, 2), nn.Linear(2, 2))

    model: Any = nn.Sequential(nn.Tanh())
    policies: Any = {nn.Tanh: build, nn.Linear: wrap}
    replaced = replace_modules(model, policies, recurse_on_replaced=recurse)
    assert [*replaced] == (["0", "0.1"] if recurse else ["0"])
    assert isinstance(model[0][1], Wrapped) is recurse


def test_submodules_of_replaced_modules_are_not_replaced():
    model: Any = nn.Sequential(Wrapped(nn.Linear(2, 2)))
    inner = model[0].inner
    policies: Any = {Wrapped: lambda module, index: nn.Sequential(module.inner), nn.Linear: wrap}
    replaced = replace_modules(model, policies)
    assert [*replaced] == ["0"]
    assert model[0][0] is inner


def test_new_modules_take_dtype_and_mode_of_the_replaced_module():
    model: Any = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16()).eval()
    model[1].train()
    replace_modules(model, {nn.Linear: lambda module, index: Wrapped(nn.Linear(2, 2), wrap(module))})
    assert [parameter.dtype for parameter in model[0].parameters()] == [torch.float64] * 4
    assert [parameter.dtype for parameter in model[1].parameters()] == [torch.bfloat16] * 4
    assert not any(module.training for module in model[0].modules())
    assert all(module.training for module in model[1].modules())


def test_the_replacement_of_a_module_without_weights_takes_the_dtype_of_the_model():
    model: Any = nn.Sequential(nn.Linear(2, 2).double(), nn.ReLU(), nn.Linear(2, 2).bfloat16()).eval()
    norm: Any = nn.BatchNorm1d(2).half()
    replace_modules(model, {nn.ReLU: lambda *_: norm})
    assert norm.weight.dtype == torch.float64 and norm.num_batches_tracked.dtype == torch.int64
    assert not norm.training


def test_a_wrapped_module_keeps_modes_and_dtypes_of_the_parts():
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).double().eval())
    model: Any = nn.Sequential(inner)
    replace_modules(model, {lambda module: module is inner: wrap})
    assert model[0].training
    assert not inner[1].training
    assert inner[1].weight.dtype == torch.float64


def test_new_modules_are_moved_to_the_device_of_the_replaced_module():
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(2, 2).bfloat16())
    replace_modules(model, {nn.Linear: lambda module, index: nn.Linear(2, 2)})
    assert model[0].weight.is_meta
    assert model[0].weight.dtype == torch.bfloat16


def test_the_replacement_of_the_model_itself_is_returned():
    model: Any = nn.Linear(2, 2)
    replaced = replace_modules(model, {nn.Linear: wrap})
    assert [*replaced] == [""]
    assert replaced[""].inner is model


def test_modules_may_be_named_like_methods():
    model = nn.ModuleDict()
    model._modules["keys"] = nn.Linear(2, 2)
    replace_modules(model, {nn.Linear: wrap})
    assert isinstance(model._modules["keys"], Wrapped)


def add_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def parametrize_weight(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", nn.Identity())


@pytest.mark.parametrize("change", [add_hook, parametrize_weight])
@pytest.mark.parametrize("inside", [False, True])
def test_modules_with_hooks_or_parametrizations_may_be_wrapped_but_not_dropped(change, inside: bool):
    linear = nn.Linear(2, 2)
    change(linear)
    model: Any = nn.Sequential(Wrapped(linear) if inside else linear)
    replaced_type = Wrapped if inside else nn.Linear
    with pytest.raises(ValueError, match=r"module .0.: hooks or parametrizations of its .*Linear"):
        replace_modules(model, {replaced_type: lambda module, index: nn.Identity()})
    replace_modules(model, {replaced_type: wrap})
    assert linear in [*model.modules()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


def test_new_parameters_join_the_group_of_the_replaced_ones():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": [*model[0].parameters()], "lr": 0.1}, {"params": [*model[1].parameters()], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    step(model, optimizer)
    reused = model[0].weight
    momentum = optimizer.state[reused]["momentum_buffer"]

    def policy(module: Any, index: int) -> nn.Module:
        copied = copy_of(module)
        if index == 0:
            copied.weight = module.weight
        return copied

    replace_modules(model, {nn.Linear: policy}, [optimizer])
    for group, layer in zip(optimizer.param_groups, model, strict=True):
        assert {*group["params"]} == {*layer.parameters()}
    assert optimizer.state[reused]["momentum_buffer"] is momentum
    assert [*optimizer.state] == [reused]
    before = [parameter.clone() for parameter in model.parameters()]
    step(model, optimizer)
    assert not any(map(torch.equal, model.parameters(), before))


def test_frozen_parameters_join_no_group():
    model: Any = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_modules(model, {nn.Linear: lambda module, index: copy_of(module).requires_grad_(False)}, [optimizer])
    assert optimizer.param_groups[0]["params"] == []


def test_new_parameters_that_could_join_several_groups_are_refused():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    with pytest.raises(ValueError, match="module '1': its new parameters belong to none or to several of the 2 groups"):
        replace_modules(model, {nn.Tanh: lambda module, index: nn.PReLU()}, optimizers)


def test_new_parameters_join_the_only_group():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_modules(model, {nn.Tanh: lambda module, index: nn.PReLU()}, [optimizer])
    assert optimizer.param_groups[0]["params"][-1] is model[1].weight


@pytest.mark.parametrize(
    ("model", "inputs", "replaced_type"),
    [
        (ResNet8(), torch.randn(2, 1, 8, 8), nn.Conv2d),
        (GPT(n_layers=1), torch.zeros(2, 4, dtype=torch.int64), nn.LayerNorm),
        (MLP(4, [3], 2), torch.randn(2, 4), nn.Linear),
    ],
)
def test_wrapping_modules_keeps_the_outputs_of_our_models(
    model: nn.Module, inputs: torch.Tensor, replaced_type: type[nn.Module]
):
    expected = model(inputs)
    count = sum(type(module) is replaced_type for module in model.modules())
    assert len(replace_modules(model, {replaced_type: wrap})) == count > 0
    assert sum(type(module) is Wrapped for module in model.modules()) == count
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=0)


def test_wrapping_modules_keeps_the_outputs_of_a_model_of_torchvision():
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    model = import_torchvision().models.resnet18().eval()
    inputs = torch.randn(1, 3, 32, 32)
    expected = model(inputs)
    assert len(replace_modules(model, {nn.Conv2d: wrap, nn.BatchNorm2d: wrap})) == 40
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=0)


def test_wrapping_modules_keeps_the_outputs_of_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertModel(config).eval()
    inputs = torch.zeros(1, 4, dtype=torch.int64)
    expected = model(inputs).last_hidden_state
    assert len(replace_modules(model, {nn.LayerNorm: wrap})) == 3
    torch.testing.assert_close(model(inputs).last_hidden_state, expected, rtol=0, atol=0)


class AddPReLU(Algorithm):
    """Adds a PReLU after the last layer."""

    def init(self, state, logger):
        policies: Any = {nn.Linear: lambda module, index: nn.Sequential(module, nn.PReLU())}
        replace_modules(state.unwrapped_model, policies, state.optimizers)


class ReplaceModel(Algorithm):
    """Replaces the whole model."""

    def init(self, state, logger):
        network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        policies: Any = {ClassificationModel: lambda module, index: ClassificationModel(network, 3)}
        replaced: Any = replace_modules(state.unwrapped_model, policies)
        state.unwrapped_model = replaced[""]


def make_trainer(tmp_path, algorithm: Algorithm, as_factory: bool) -> Trainer:
    torch.manual_seed(0)  # with other inputs, all outputs may be above 0, where a PReLU has no gradient
    model = ClassificationModel(nn.Linear(4, 3), 3)
    optimizers = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    return Trainer(
        model=model,
        train_dataloader=[(torch.randn(2, 4), torch.tensor([0, 2]))],
        optimizers=optimizers if as_factory else optimizers(model.parameters()),
        algorithms=algorithm,
        max_duration="1ba",
        device="cpu",
        run_dir=tmp_path,
    )


@pytest.mark.parametrize("as_factory", [True, False])
def test_an_algorithm_replaces_the_network_of_a_model_that_then_trains(tmp_path, as_factory: bool):
    with make_trainer(tmp_path, AddPReLU(), as_factory) as trainer:
        model: Any = trainer.state.unwrapped_model
        assert isinstance(model.module[1], nn.PReLU)
        before = [parameter.clone() for parameter in model.parameters()]
        trainer.fit()
        assert len(before) == 3
        assert not any(map(torch.equal, before, model.parameters()))


def test_an_algorithm_replaces_the_whole_model_that_then_trains(tmp_path):
    with make_trainer(tmp_path, ReplaceModel(), as_factory=True) as trainer:
        model: Any = trainer.state.unwrapped_model
        assert trainer.state.model is model
        before = model.module[1].weight.clone()
        trainer.fit()
        assert not torch.equal(model.module[1].weight, before)
