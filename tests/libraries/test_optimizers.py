"""An optimizer's step without torch's wrapper is its step, and what looks on is still called."""

from __future__ import annotations

import functools
import pkgutil
import runpy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runner.libraries import optimizers
from runner.libraries.optimizers import step


def make(kind: Any, **arguments: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
    weight.grad = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    return weight, kind([weight], lr=0.1, **arguments)


def doubled(function: Any) -> Any:
    @functools.wraps(function)  # and with its name, all that torch has noted on the function
    def twice(*arguments: Any) -> None:
        function(*arguments)
        function(*arguments)

    return twice


class Decorated(torch.optim.SGD):
    """Steps twice by a function that looks like its parent's step."""

    step = doubled(torch.optim.SGD.step)


class Doubled(torch.optim.SGD):
    """Steps twice by its parent's step."""

    def step(self, closure: Any = None) -> None:
        super().step()
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, Doubled, Decorated])
def test_the_step_is_torchs_to_the_bit(kind: Any):
    (plain, by_torch), (ours, optimizer) = make(kind), make(kind)
    for _ in range(3):
        by_torch.step()
        step(optimizer)
    assert torch.equal(plain, ours) and not torch.equal(ours, make(kind)[0])
    assert optimizer.state_dict().keys() == by_torch.state_dict().keys()


def test_gradients_are_not_recorded():
    weight, optimizer = make(torch.optim.SGD)
    step(optimizer)
    assert weight.is_leaf and torch.is_grad_enabled()


def test_a_differentiable_step_is_recorded():
    _, optimizer = make(torch.optim.SGD, differentiable=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):  # which a recorded step may not change
        step(optimizer)
    assert torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_optimizer_is_made_stepped_saved_and_loaded_without_the_compiler(kind: str):
    code = (
        "import sys, torch\n"
        "from runner.optim.factories import make_optimizers\n"
        "from runner.libraries.optimizers import step\n"
        "model = torch.nn.Linear(2, 2)\n"
        f"(optimizer,) = make_optimizers(torch.optim.{kind}, model)\n"
        "model(torch.ones(2)).sum().backward()\n"
        "step(optimizer)\n"
        "optimizer.load_state_dict(optimizer.state_dict())\n"
        "print('torch._dynamo' in sys.modules)\n"
        "compiled = torch.compile(model, backend='eager')\n"  # and it is there when it is needed
        "print(torch.equal(compiled(torch.ones(2)), model(torch.ones(2))), 'torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "torch.autograd._profiler_enabled",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch.optim.optimizer._use_grad_for_differentiable",
        "torch.optim.Optimizer.profile_hook_step",
    ],
)
def test_another_torch_steps_as_it_does_itself(name: str, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as missing:
        owner, _, last = name.rpartition(".")
        missing.delattr(pkgutil.resolve_name(owner), last)
        other = runpy.run_path(optimizers.__file__)
    (plain, by_torch), (ours, optimizer) = make(torch.optim.SGD), make(torch.optim.SGD)
    by_torch.step()
    other["step"](optimizer)
    assert torch.equal(plain, ours) and other["_WRAPPER"] is None


def test_the_compiler_of_another_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    plain = torch.optim.Optimizer.state_dict.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.optim.Optimizer, "state_dict", plain)
    before = dict(vars(plain))
    optimizers.spare_compiler()
    assert vars(plain) == before and make(torch.optim.SGD)[1].state_dict()["param_groups"]


@pytest.mark.parametrize("where", ["before", "after", "of all", "on the object", "profiler"])
def test_what_looks_on_is_called(where: str):
    weight, optimizer = make(torch.optim.SGD)
    called = []
    remove: Any = None
    if where == "before":
        optimizer.register_step_pre_hook(lambda *_: called.append(where))
    elif where == "after":
        optimizer.register_step_post_hook(lambda *_: called.append(where))
    elif where == "of all":
        remove = register_optimizer_step_pre_hook(lambda *_: called.append(where)).remove
    elif where == "on the object":
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = weight.detach().clone()
    if where == "profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(optimizer)
        called += [one.key for one in profile.key_averages() if one.key == "Optimizer.step#SGD.step"]
    else:
        step(optimizer)
    if remove is not None:
        remove()
    if where == "on the object":
        called += [where] * optimizer._opt_called  # pyright: ignore[reportAttributeAccessIssue]
    assert len(called) == 1 and not torch.equal(before, weight)
