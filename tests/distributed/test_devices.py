"""The device that a rank uses, and names of devices that are refused."""

from __future__ import annotations

import pytest
import torch

from runner.distributed.collectives import pick_device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "", "cuda:99", "xpu", "vulkan", "hpu"])
def test_a_missing_or_unknown_device_is_refused(device: str):
    with pytest.raises(ValueError, match="device='"):
        pick_device(device)


def test_the_error_for_cuda_says_that_the_machine_has_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="torch finds none here; give auto or cpu"):
        pick_device("cuda")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_rank_without_a_gpu_of_its_own_is_refused(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device(device) == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="this rank would use GPU 2, but torch finds 2 here"):
        pick_device(device)
