"""An optimizer step without the wrapper of torch has the same effect, and still calls hooks and profilers."""

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
    @functools.wraps(function)  # which also copies the attributes that torch sets on the function
    def twice(*arguments: Any) -> None:
        function(*arguments)
        function(*arguments)

    return twice


class Decorated(torch.optim.SGD):
    """Steps twice by a wrapper that has the attributes of its parent's step."""

    step = doubled(torch.optim.SGD.step)


class Doubled(torch.optim.SGD):
    """Steps twice by calling its parent's step."""

    def step(self, closure: Any = None) -> None:
        super().step()
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, Doubled, Decorated])
def test_a_step_equals_that_of_torch_to_the_bit(kind: Any):
    (plain, by_torch), (ours, optimizer) = make(kind), make(kind)
    for _ in range(3):
        by_torch.step()
        step(optimizer)
    assert torch.equal(plain, ours) and not torch.equal(ours, make(kind)[0])
    assert optimizer.state_dict().keys() == by_torch.state_dict().keys()


def test_a_step_is_not_recorded_by_autograd():
    weight, optimizer = make(torch.optim.SGD)
    step(optimizer)
    assert weight.is_leaf and torch.is_grad_enabled()


def test_a_differentiable_step_is_recorded_by_autograd():
    _, optimizer = make(torch.optim.SGD, differentiable=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):  # autograd refuses the in-place change
        step(optimizer)
    assert torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_optimizer_is_made_stepped_saved_and_loaded_without_importing_the_compiler(kind: str):
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
        "compiled = torch.compile(model, backend='eager')\n"  # the compiler is imported when needed
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
def test_another_torch_version_falls_back_to_its_own_step(name: str, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as missing:
        owner, _, last = name.rpartition(".")
        missing.delattr(pkgutil.resolve_name(owner), last)
        other = runpy.run_path(optimizers.__file__)
    (plain, by_torch), (ours, optimizer) = make(torch.optim.SGD), make(torch.optim.SGD)
    by_torch.step()
    other["step"](optimizer)
    assert torch.equal(plain, ours) and other["_WRAPPER"] is None


def test_a_state_dict_without_wrapper_is_not_changed(monkeypatch: pytest.MonkeyPatch):
    plain = torch.optim.Optimizer.state_dict.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.optim.Optimizer, "state_dict", plain)
    before = dict(vars(plain))
    optimizers.spare_compiler()
    assert vars(plain) == before and make(torch.optim.SGD)[1].state_dict()["param_groups"]


@pytest.mark.parametrize("observer", ["pre-hook", "post-hook", "global hook", "patched step", "profiler"])
def test_hooks_schedulers_and_profilers_see_the_step(observer: str):
    weight, optimizer = make(torch.optim.SGD)
    called = []
    remove: Any = None
    if observer == "pre-hook":
        optimizer.register_step_pre_hook(lambda *_: called.append(observer))
    elif observer == "post-hook":
        optimizer.register_step_post_hook(lambda *_: called.append(observer))
    elif observer == "global hook":
        remove = register_optimizer_step_pre_hook(lambda *_: called.append(observer)).remove
    elif observer == "patched step":
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = weight.detach().clone()
    if observer == "profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(optimizer)
        called += [row.key for row in profile.key_averages() if row.key == "Optimizer.step#SGD.step"]
    else:
        step(optimizer)
    if remove is not None:
        remove()
    if observer == "patched step":
        called += [observer] * optimizer._opt_called  # pyright: ignore[reportAttributeAccessIssue]
    assert len(called) == 1 and not torch.equal(before, weight)
