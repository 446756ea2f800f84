"""Settings of torch for TF32 and deterministic algorithms are changed for a run and restored."""

from __future__ import annotations

import torch

from runner.device.numerics import set_numerics


def test_tf32_is_set_for_a_run_and_the_previous_setting_is_restored_once():
    restore = set_numerics(deterministic=False, tf32=True)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    restore()
    assert torch.get_float32_matmul_precision() == "highest"
    torch.set_float32_matmul_precision("medium")  # a later setting must stay
    try:
        restore()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_settings_stay_as_they_are_without_tf32_and_determinism():
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    set_numerics(deterministic=False)
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()) == before
