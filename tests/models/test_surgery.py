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


class Doubled(nn.Linear):
    """A linear layer whose type is another."""


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
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3), nn.ReLU()), Doubled(3, 3))
    before = [model[0], model[1][0]]
    asked = []
    x = torch.randn(4, 2)
    expected = model(x)

    def policy(module: nn.Module, index: int) -> nn.Module:
        asked.append((module, index))
        return copy_of(module)

    replaced = replace_modules(model, {nn.Linear: policy})
    assert asked == [(before[0], 0), (before[1], 1)]
    assert replaced == {"0": model[0], "1.0": model[1][0]}
    assert model[0] is not before[0]
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_a_predicate_selects_and_a_policy_may_decline():
    model: Any = nn.Sequential(nn.Linear(2, 2), Doubled(2, 2), nn.Linear(2, 2))
    first, second, third = model
    replaced = replace_modules(
        model, {lambda one: isinstance(one, nn.Linear): lambda one, index: None if index == 1 else copy_of(one)}
    )
    assert [*replaced] == ["0", "2"]
    assert model[0] is not first
    assert model[1] is second
    assert model[2] is not third


def test_the_first_selector_that_fits_decides():
    model: Any = nn.Sequential(nn.Linear(2, 2))
    replace_modules(
        model,
        {nn.Linear: lambda one, index: None, lambda one: isinstance(one, nn.Linear): lambda one, index: wrap(one)},
    )
    assert type(model[0]) is nn.Linear


def test_a_module_in_two_places_is_replaced_once_for_both():
    shared = nn.Linear(2, 2)
    model: Any = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(shared))
    replaced = replace_modules(model, {nn.Linear: lambda one, index: copy_of(one)})
    assert [*replaced] == ["0"]
    assert model[0] is model[2] is model[3][0] is replaced["0"]
    assert model[0] is not shared


@pytest.mark.parametrize("recurse", [False, True])
def test_a_replacement_may_hold_what_it_replaces(recurse: bool):
    shared = nn.Linear(2, 2)
    model: Any = nn.Sequential(shared, shared)
    replace_modules(model, {nn.Linear: wrap}, recurse_on_replaced=recurse)
    assert model[0] is model[1]
    assert model[0].inner is shared


def test_replacements_are_searched_only_when_asked():
    def build(module: nn.Module, index: int) -> nn.Module:
        return nn.Sequential(Doubled(2, 2), nn.Linear(2, 2))

    for recurse in (False, True):
        model: Any = nn.Sequential(nn.Tanh())
        policies: Any = {nn.Tanh: build, nn.Linear: wrap}
        replaced = replace_modules(model, policies, recurse_on_replaced=recurse)
        assert [*replaced] == (["0", "0.1"] if recurse else ["0"])
        assert isinstance(model[0][1], Wrapped) is recurse


def test_parts_of_what_is_replaced_are_not_touched():
    model: Any = nn.Sequential(Wrapped(nn.Linear(2, 2)))
    inner = model[0].inner
    policies: Any = {Wrapped: lambda one, index: nn.Sequential(one.inner), nn.Linear: wrap}
    replaced = replace_modules(model, policies)
    assert [*replaced] == ["0"]
    assert model[0][0] is inner


def test_what_is_new_has_the_dtype_and_mode_of_what_it_replaces():
    model: Any = nn.Sequential(nn.Linear(2, 2).double(), nn.ReLU(), nn.Linear(2, 2).bfloat16()).eval()
    model[2].train()
    kept = nn.BatchNorm1d(2).half()

    replace_modules(
        model, {nn.Linear: lambda one, index: Wrapped(nn.Linear(2, 2), wrap(one)), nn.ReLU: lambda *_: kept}
    )
    assert [one.dtype for one in model[0].parameters()] == [torch.float64] * 4
    assert [one.dtype for one in model[2].parameters()] == [torch.bfloat16] * 4
    assert not any(one.training for one in model[0].modules())
    assert all(one.training for one in model[2].modules())
    # The replacement of a module without weights gets the dtype of the model.
    assert kept.weight.dtype == torch.float64
    assert kept.num_batches_tracked is not None
    assert kept.num_batches_tracked.dtype == torch.int64
    assert not kept.training


def test_modes_and_types_inside_of_what_is_kept_stay():
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).double().eval())
    model: Any = nn.Sequential(inner)
    replace_modules(model, {lambda one: one is inner: wrap})
    assert model[0].training
    assert not inner[1].training
    assert inner[1].weight.dtype == torch.float64


def test_what_is_new_is_on_the_device_of_what_it_replaces():
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(2, 2).bfloat16())
    replace_modules(model, {nn.Linear: lambda one, index: nn.Linear(2, 2)})
    assert model[0].weight.is_meta
    assert model[0].weight.dtype == torch.bfloat16


def test_the_model_itself_is_left_to_the_caller():
    model: Any = nn.Linear(2, 2)
    replaced = replace_modules(model, {nn.Linear: wrap})
    assert [*replaced] == [""]
    assert replaced[""].inner is model


def test_names_of_modules_may_be_those_of_methods():
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
def test_hooks_and_parametrizations_are_kept_or_refused(change, inside: bool):
    linear = nn.Linear(2, 2)
    change(linear)
    model: Any = nn.Sequential(Wrapped(linear) if inside else linear)
    kind = Wrapped if inside else nn.Linear
    with pytest.raises(ValueError, match=r"module .0.: hooks or parametrizations of its .*Linear"):
        replace_modules(model, {kind: lambda one, index: nn.Identity()})
    replace_modules(model, {kind: wrap})
    assert linear in [*model.modules()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


def test_new_parameters_join_the_group_of_those_replaced():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": [*model[0].parameters()], "lr": 0.1}, {"params": [*model[1].parameters()], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    step(model, optimizer)
    stayed = model[0].weight
    momentum = optimizer.state[stayed]["momentum_buffer"]

    def take_over(module: nn.Module, index: int) -> nn.Module:
        new = copy_of(module)
        if index == 0:
            assert isinstance(module, nn.Linear)
            new.weight = module.weight
        return new

    replace_modules(model, {nn.Linear: take_over}, [optimizer])
    for group, part in zip(optimizer.param_groups, model, strict=True):
        assert {id(one) for one in group["params"]} == {id(one) for one in part.parameters()}
    assert optimizer.state[stayed]["momentum_buffer"] is momentum
    assert [*optimizer.state] == [stayed]
    weights = [one.clone() for one in model.parameters()]
    step(model, optimizer)
    assert not any(torch.equal(one, was) for one, was in zip(model.parameters(), weights, strict=True))


def test_frozen_parameters_join_no_group():
    model: Any = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_modules(model, {nn.Linear: lambda one, index: copy_of(one).requires_grad_(False)}, [optimizer])
    assert optimizer.param_groups[0]["params"] == []


def test_parameters_without_a_group_of_their_own_are_refused():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model[0], model[2])]
    with pytest.raises(ValueError, match="module '1': its new parameters belong to none or to several of the 2 groups"):
        replace_modules(model, {nn.Tanh: lambda one, index: nn.PReLU()}, optimizers)


def test_with_one_group_all_parameters_belong_to_it():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_modules(model, {nn.Tanh: lambda one, index: nn.PReLU()}, [optimizer])
    assert optimizer.param_groups[0]["params"][-1] is model[1].weight


@pytest.mark.parametrize(
    ("model", "inputs", "kind"),
    [
        (ResNet8(), torch.randn(2, 1, 8, 8), nn.Conv2d),
        (GPT(n_layers=1), torch.zeros(2, 4, dtype=torch.int64), nn.LayerNorm),
        (MLP(4, [3], 2), torch.randn(2, 4), nn.Linear),
    ],
)
def test_the_shipped_models(model: nn.Module, inputs: torch.Tensor, kind: type[nn.Module]):
    expected = model(inputs)
    count = sum(type(one) is kind for one in model.modules())
    assert len(replace_modules(model, {kind: wrap})) == count > 0
    assert sum(type(one) is Wrapped for one in model.modules()) == count
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=0)


def test_models_of_torchvision():
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    model = import_torchvision().models.resnet18().eval()
    inputs = torch.randn(1, 3, 32, 32)
    expected = model(inputs)
    assert len(replace_modules(model, {nn.Conv2d: wrap, nn.BatchNorm2d: wrap})) == 40
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=0)


def test_models_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertModel(config).eval()
    inputs = torch.zeros(1, 4, dtype=torch.int64)
    expected = model(inputs).last_hidden_state
    assert len(replace_modules(model, {nn.LayerNorm: wrap})) == 3
    torch.testing.assert_close(model(inputs).last_hidden_state, expected, rtol=0, atol=0)


class Surgeon(Algorithm):
    """Adds a PReLU after the last layer, or replaces the whole model."""

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def init(self, state, logger):
        if self.whole:
            net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
            whole: Any = {ClassificationModel: lambda one, index: ClassificationModel(net, 3)}
            made: Any = replace_modules(state.unwrapped_model, whole)
            state.unwrapped_model = made[""]
        else:
            policy: Any = {nn.Linear: lambda one, index: nn.Sequential(one, nn.PReLU())}
            replace_modules(state.unwrapped_model, policy, state.optimizers)


def make_run(tmp_path, whole: bool, as_factory: bool) -> Trainer:
    torch.manual_seed(0)  # with some inputs, no output is below 0 and the PReLU has no gradient
    model = ClassificationModel(nn.Linear(4, 3), 3)
    optimizers = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    return Trainer(
        model=model,
        train_dataloader=[(torch.randn(2, 4), torch.tensor([0, 2]))],
        optimizers=optimizers if as_factory else optimizers(model.parameters()),
        algorithms=Surgeon(whole),
        max_duration="1ba",
        device="cpu",
        run_dir=tmp_path,
    )


@pytest.mark.parametrize("as_factory", [True, False])
def test_the_root_of_a_wrapped_network_is_replaced_and_trained(tmp_path, as_factory: bool):
    with make_run(tmp_path, whole=False, as_factory=as_factory) as trainer:
        net: Any = trainer.state.unwrapped_model.module
        prelu = net[1]
        assert isinstance(prelu, nn.PReLU)
        before = [one.clone() for one in trainer.state.unwrapped_model.parameters()]
        trainer.fit()
        after = [*trainer.state.unwrapped_model.parameters()]
        assert len(before) == 3
        assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_whole_model_is_replaced_and_trained(tmp_path):
    with make_run(tmp_path, whole=True, as_factory=True) as trainer:
        model: Any = trainer.state.unwrapped_model
        assert trainer.state.model is model
        before = model.module[1].weight.clone()
        trainer.fit()
        assert not torch.equal(model.module[1].weight, before)
