from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runs import program_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from runner.algorithms import GradientClipping
from runner.algorithms.gradient_clipping import clip_adaptively


@pytest.mark.parametrize("grad_accum", [1, 4])
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_gradients_are_clipped_as_torch_does(train, kind: str, grad_accum: int):
    threshold = {"norm": 0.1, "value": 0.02}[kind]
    plain = train(max_duration="1ba").gradients[0]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in plain]
    for parameter, gradient in zip(parameters, plain, strict=True):
        parameter.grad = gradient.clone()
    if kind == "norm":
        assert nn.utils.clip_grad_norm_(parameters, threshold) > threshold
    else:
        nn.utils.clip_grad_value_(parameters, threshold)
    clipped = train(GradientClipping(kind, threshold), max_duration="1ba", grad_accum=grad_accum).gradients[0]
    torch.testing.assert_close(clipped, [parameter.grad for parameter in parameters])


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_gradients_below_the_threshold_stay_unchanged(train, kind: str):
    plain = train(max_duration="1ba").gradients[0]
    clipped = train(GradientClipping(kind, 1e6), max_duration="1ba").gradients[0]
    torch.testing.assert_close(clipped, plain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (4, 3, 2, 2)])
def test_adaptive_clipping_follows_the_formula_per_output_unit(shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
    gradient = 5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    parameter.grad = gradient.clone()
    clip_adaptively([parameter], threshold=0.4)
    units = range(shape[0]) if len(shape) > 1 else [...]
    for unit in units:
        limit = 0.4 * max(float(parameter.detach()[unit].norm()), 1e-3)
        factor = min(1.0, limit / float(gradient[unit].norm()))
        torch.testing.assert_close(parameter.grad[unit], gradient[unit] * factor)
    assert not torch.equal(parameter.grad, gradient)


def test_units_with_weights_of_zero_keep_a_small_gradient():
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.ones(2, 3)
    clip_adaptively([parameter, nn.Parameter(torch.zeros(1))], threshold=0.5)
    torch.testing.assert_close(parameter.grad.norm(dim=1), torch.full((2,), 0.5e-3))


def clip_on_a_rank() -> None:
    """Clip the gradients of a sharded layer on this rank, and compare them with those of a whole layer."""
    torch.manual_seed(0)
    plain, sharded = nn.Linear(6, 4), nn.Linear(6, 4)
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    inputs = torch.randn(3, 6)
    for model in (plain, sharded):
        (model(inputs) ** 2).sum().backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    state: Any = SimpleNamespace(optimizers=[torch.optim.SGD(sharded.parameters(), lr=0.1)])
    logger: Any = None
    GradientClipping("norm", 0.5).after_train_batch(state, logger)
    for parameter, shard in zip(plain.parameters(), sharded.parameters(), strict=True):
        gradient: Any = shard.grad
        torch.testing.assert_close(gradient.full_tensor(), parameter.grad)
    dist.destroy_process_group()


def test_sharded_gradients_are_clipped_by_their_total_norm(run_ranks):
    run_ranks(program_of("algorithms/test_gradient_clipping", "clip_on_a_rank"))


@pytest.mark.parametrize("arguments", [{"clipping_type": "norms"}, {"clipping_threshold": 0}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        GradientClipping(**arguments)
