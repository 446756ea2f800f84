from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner import Callback, ClassificationModel
from runner.algorithms import LowPrecisionLayerNorm
from runner.algorithms._low_precision import in_low_precision


def net(affine: bool = True, bias: bool = True) -> ClassificationModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        norm = nn.LayerNorm(6, eps=1e-3, elementwise_affine=affine, bias=bias)
        if affine:
            nn.init.normal_(norm.weight)
        return ClassificationModel(nn.Sequential(nn.Flatten(), nn.Linear(32, 6), norm, nn.Linear(6, 3)), 3)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 2, 4, 4, generator=generator), torch.arange(8) % 3) for _ in range(3)]


FLOATS = {"train_dataloader": data(), "eval_dataloader": data()}


class Types(Callback):
    """Keeps the types that the norm was given and gave, and the greatest difference from one in 32 bits."""

    def __init__(self) -> None:
        self.seen: set[tuple[torch.dtype, torch.dtype]] = set()
        self.difference = 0.0

    def fit_start(self, state, logger):
        def look(module, inputs, output):
            self.seen.add((inputs[0].dtype, output.dtype))
            weight, bias = (None if one is None else one.float() for one in (module.weight, module.bias))
            expected = F.layer_norm(inputs[0].float(), (6,), weight, bias, 1e-3)
            self.difference = max(self.difference, (output.float() - expected).abs().max().item())

        net: Any = state.unwrapped_model.module
        net[2].register_forward_hook(look)


@pytest.mark.filterwarnings("ignore:.*no bfloat16 unit")
@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
def test_norms_run_in_the_type_of_autocast(make_trainer, affine: bool, bias: bool):
    types = Types()
    model = net(affine, bias)
    before = {*model.parameters()}
    with make_trainer(
        LowPrecisionLayerNorm(), model=model, precision="amp_bf16", callbacks=[types], **FLOATS
    ) as trainer:
        assert type(model.module[2]) is not nn.LayerNorm  # type: ignore[index]
        assert {*model.parameters()} == before
        assert [*model.state_dict()] == [*net(affine, bias).state_dict()]
        trainer.fit()
    assert types.seen == {(torch.bfloat16, torch.bfloat16)}
    assert 0 < types.difference < 0.05  # bfloat16 has 8 bits: 0.4 % of values up to about 5


@pytest.mark.filterwarnings("ignore:.*no bfloat16 unit")
def test_even_an_input_in_32_bits_is_normalized_in_low_precision():
    from runner.algorithms.low_precision_layer_norm import _LowLayerNorm

    norm = _LowLayerNorm(6)
    with torch.autocast("cpu", torch.bfloat16):
        output = norm(torch.randn(2, 6))
        assert torch.is_autocast_enabled("cpu")
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype == torch.float32


def test_all_tensors_have_the_type_of_autocast_which_is_off_within():
    seen = []

    def look(*tensors: torch.Tensor | None) -> torch.Tensor:
        seen.append([None if one is None else one.dtype for one in tensors])
        return torch.ones(2, 2) @ torch.ones(2, 2)

    with torch.autocast("cpu", torch.float16):
        assert in_low_precision(look, torch.ones(2), torch.ones(2), None).dtype == torch.float32
    in_low_precision(look, torch.ones(2), torch.ones(2), None)
    assert seen == [[torch.float16, torch.float16, None], [torch.float32, torch.float32, None]]


def test_without_autocast_nothing_changes_and_that_is_said(train, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "runner"):
        low = train(LowPrecisionLayerNorm(), model=net(), **FLOATS)
    assert "LowPrecisionLayerNorm changes nothing with precision=fp32" in caplog.text
    torch.testing.assert_close(low.seen, train(model=net(), **FLOATS).seen, rtol=0, atol=0)


def test_a_model_without_layer_norm_is_refused(make_trainer):
    with pytest.raises(ValueError, match="LowPrecisionLayerNorm found no LayerNorm"):
        make_trainer(LowPrecisionLayerNorm())
    make_trainer(LowPrecisionLayerNorm(allow_no_match=True)).close()


@pytest.mark.filterwarnings("ignore:.*no bfloat16 unit")
def test_resume(check_resume):
    check_resume(lambda: [LowPrecisionLayerNorm()], build=net, precision="amp_bf16", **FLOATS)
