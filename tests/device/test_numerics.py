from __future__ import annotations

import torch

from runner.device.numerics import set_numerics


def test_tf32_is_on_for_a_run_and_what_was_comes_back_once():
    restore = set_numerics(deterministic=False, tf32=True)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    restore()
    assert torch.get_float32_matmul_precision() == "highest"
    torch.set_float32_matmul_precision("medium")  # by somebody else
    try:
        restore()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_nothing_is_changed_unasked():
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    set_numerics(deterministic=False)
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision())
