"""Our backward pass from a given gradient equals torch's, with or without torch's private function."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph

from runner.libraries import backward as module


@pytest.fixture
def clear_cache():
    module._runs_as_expected.cache_clear()
    yield
    module._runs_as_expected.cache_clear()


def gradients(backward: Any) -> list[Tensor]:
    """Return the gradients that two backward passes from a gradient of 0.3 leave in a network."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        inputs = torch.randn(5, 4)
    for _ in range(2):
        backward(network(inputs).square().mean(), torch.tensor(0.3))
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def test_gradients_equal_those_of_torch_bit_for_bit(clear_cache: None, monkeypatch: pytest.MonkeyPatch):
    assert module._runs_as_expected()
    expected = gradients(Tensor.backward)
    monkeypatch.setattr(Tensor, "backward", None)  # must not be called
    assert all(map(torch.equal, gradients(module.backward), expected))


@pytest.mark.parametrize(
    "replacement", [None, lambda loss: None, lambda *_, **__: (), print], ids=["none", "one", "any", "C"]
)
def test_the_public_method_is_used_if_the_private_function_is_missing_or_different(
    replacement: Any, clear_cache: None, monkeypatch: pytest.MonkeyPatch
):
    expected = gradients(Tensor.backward)
    calls = []

    def public(loss: Tensor, gradient: Tensor) -> None:
        calls.append(loss)
        real((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    real = graph._engine_run_backward
    if replacement is None:
        monkeypatch.delattr(graph, "_engine_run_backward")
    else:
        monkeypatch.setattr(graph, "_engine_run_backward", replacement)
    monkeypatch.setattr(Tensor, "backward", public)
    assert all(map(torch.equal, gradients(module.backward), expected)) and len(calls) == 2


def test_a_loss_of_a_tensor_subclass_uses_its_own_backward():
    calls = []

    class Loss(Tensor):
        def backward(self, *args: Any, **kwargs: Any) -> None:
            calls.append(args)

    module.backward(torch.ones(()).as_subclass(Loss), torch.ones(()))
    assert len(calls) == 1


@pytest.mark.slow
def test_training_a_batch_does_not_import_sympy():
    code = (
        "import sys, torch\n"
        "from runner import ClassificationModel, Trainer\n"
        "batch = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)\n"
        "with Trainer(model=ClassificationModel(torch.nn.Linear(3, 2), 2), train_dataloader=[batch],\n"
        "             optimizers=torch.optim.SGD, device='cpu') as trainer:\n"
        "    trainer.fit()\n"
        "print(int(trainer.state.timestamp.batch), 'sympy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["1", "False"], done.stderr
