"""Shared code of the tests of low-precision norms: a model with a norm, its data, and a record of dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runner import Algorithm, Callback, ClassificationModel


def make_net(norm: nn.Module) -> ClassificationModel:
    """Return a model whose third module is a norm of six features, with random weights if it has any."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if norm.weight is not None:
            nn.init.normal_(norm.weight)  # type: ignore[arg-type]
        return ClassificationModel(nn.Sequential(nn.Flatten(), nn.Linear(32, 6), norm, nn.Linear(6, 3)), 3)


def make_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 2, 4, 4, generator=generator), torch.arange(8) % 3) for _ in range(3)]


FLOATS = {"train_dataloader": make_data(), "eval_dataloader": make_data()}


class Types(Callback):
    """Stores the dtypes of the norm's inputs and outputs, and the largest difference from a norm in 32 bits."""

    def __init__(self, normalize: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]) -> None:
        self.normalize = normalize
        self.seen: set[tuple[torch.dtype, torch.dtype]] = set()
        self.difference = 0.0

    def fit_start(self, state, logger):
        def compare(module, inputs, output):
            self.seen.add((inputs[0].dtype, output.dtype))
            weight, bias = (None if tensor is None else tensor.float() for tensor in (module.weight, module.bias))
            expected = self.normalize(inputs[0].float(), weight, bias)
            self.difference = max(self.difference, (output.float() - expected).abs().max().item())

        net: Any = state.unwrapped_model.module
        net[2].register_forward_hook(compare)


def check_types(
    make_trainer: Any, algorithm: Algorithm, build: Callable[[], ClassificationModel], types: Types
) -> None:
    """Train in bfloat16, and check that the norm has been replaced, keeps its weights, and runs in bfloat16."""
    model: Any = build()
    before = {*model.parameters()}
    kind = type(model.module[2])
    arguments = {"model": model, "precision": "amp_bf16", "callbacks": [types], **FLOATS}
    with make_trainer(algorithm, **arguments) as trainer:
        assert type(model.module[2]) is not kind
        assert {*model.parameters()} == before
        assert [*model.state_dict()] == [*build().state_dict()]
        trainer.fit()
    assert types.seen == {(torch.bfloat16, torch.bfloat16)}
    assert 0 < types.difference < 0.05  # bfloat16 has 8 bits: 0.4 % of values up to about 5


def check_input_in_32_bits(norm: nn.Module) -> None:
    """Check that a norm of six features runs in autocast's dtype, and that its weights get gradients in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        output = norm(torch.randn(2, 6))
        assert torch.is_autocast_enabled("cpu")
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    gradients = [parameter.grad for parameter in norm.parameters()]
    assert [gradient.dtype for gradient in gradients if gradient is not None] == [torch.float32] * 2
