from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from low_precision import FLOATS, Types, check_input_in_32_bits, check_types, make_net
from torch import nn

from runner import ClassificationModel
from runner.algorithms import LowPrecisionLayerNorm
from runner.algorithms._low_precision import in_low_precision


def net(affine: bool = True, bias: bool = True) -> ClassificationModel:
    return make_net(nn.LayerNorm(6, eps=1e-3, elementwise_affine=affine, bias=bias))


@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
def test_layer_norms_run_in_the_dtype_of_autocast(make_trainer, affine: bool, bias: bool):
    types = Types(lambda inputs, weight, bias: F.layer_norm(inputs, (6,), weight, bias, 1e-3))
    check_types(make_trainer, LowPrecisionLayerNorm(), lambda: net(affine, bias), types)


def test_a_float32_input_is_normalized_in_the_dtype_of_autocast():
    from runner.algorithms.low_precision_layer_norm import _LowLayerNorm

    check_input_in_32_bits(_LowLayerNorm(6))


def test_tensors_get_the_dtype_of_autocast_which_is_disabled_inside():
    dtypes = []

    def compute(*tensors: torch.Tensor | None) -> torch.Tensor:
        dtypes.append([None if tensor is None else tensor.dtype for tensor in tensors])
        return torch.ones(2, 2) @ torch.ones(2, 2)

    with torch.autocast("cpu", torch.float16):
        assert in_low_precision(compute, torch.ones(2), torch.ones(2), None).dtype == torch.float32
    in_low_precision(compute, torch.ones(2), torch.ones(2), None)
    assert dtypes == [[torch.float16, torch.float16, None], [torch.float32, torch.float32, None]]


def test_without_autocast_training_is_unchanged_and_a_warning_says_so(train, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "runner"):
        low = train(LowPrecisionLayerNorm(), model=net(), **FLOATS)
    assert "LowPrecisionLayerNorm changes nothing with precision=fp32" in caplog.text
    torch.testing.assert_close(low.gradients, train(model=net(), **FLOATS).gradients, rtol=0, atol=0)
