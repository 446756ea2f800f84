from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from runner.optim.backward import backward


class Own(Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize("kind", [Tensor, Own])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_gradients_are_those_of_torch(kind: type[Tensor], scale: float):
    model = nn.Linear(3, 2)
    found = []
    for function in (Tensor.backward, backward):
        model.zero_grad()
        for inputs in (torch.arange(6.0).view(2, 3), torch.ones(2, 3)):  # their gradients add up
            total = model(inputs).square().mean().as_subclass(kind)
            function(total, torch.full_like(total, scale))
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_the_symbolic_shapes_of_torch_are_not_imported():
    code = (
        "import sys, torch\n"
        "from runner.optim.backward import backward\n"
        "backward(torch.ones((), requires_grad=True) * 2, torch.ones(()))\n"
        "print('sympy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr


def test_a_graph_is_freed_and_a_constant_is_refused():
    weight = torch.ones((), requires_grad=True)
    total = weight.square()
    backward(total, torch.ones(()))
    for wrong in (total, torch.ones(())):
        with pytest.raises(RuntimeError, match="second time|does not require grad"):
            backward(wrong, torch.ones(()))
