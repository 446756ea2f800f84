from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from low_precision import FLOATS, Types, check_input_in_32_bits, check_types, make_net
from torch import nn

from runner import ClassificationModel
from runner.algorithms import LowPrecisionGroupNorm


def net(affine: bool = True) -> ClassificationModel:
    return make_net(nn.GroupNorm(2, 6, eps=1e-3, affine=affine))


@pytest.mark.parametrize("affine", [True, False])
def test_group_norms_run_in_the_dtype_of_autocast(make_trainer, affine: bool):
    types = Types(lambda inputs, weight, bias: F.group_norm(inputs, 2, weight, bias, 1e-3))
    check_types(make_trainer, LowPrecisionGroupNorm(), lambda: net(affine), types)


def test_a_float32_input_is_normalized_in_the_dtype_of_autocast():
    from runner.algorithms.low_precision_group_norm import _LowGroupNorm

    check_input_in_32_bits(_LowGroupNorm(2, 6))


def test_without_autocast_training_is_unchanged_and_a_warning_says_so(train, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "runner"):
        low = train(LowPrecisionGroupNorm(), model=net(), **FLOATS)
    assert "LowPrecisionGroupNorm changes nothing with precision=fp32" in caplog.text
    torch.testing.assert_close(low.gradients, train(model=net(), **FLOATS).gradients, rtol=0, atol=0)
