"""Copies to the host, on a stand-in for a GPU whose copies run as late as they may."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runner.device.staging import Staging, staging

CPU = torch.device("cpu")


class Event:
    """Runs, when waited for, what was queued before it was recorded."""

    def __init__(self, gpu: GPU):
        self.gpu = gpu
        self.place = 0

    def record(self, stream: Any) -> None:
        self.place = len(self.gpu.queued)

    def synchronize(self) -> None:
        self.gpu.waits += 1
        while self.gpu.ran < self.place:
            self.gpu.queued[self.gpu.ran]()
            self.gpu.ran += 1


class GPU(TorchFunctionMode):
    """A stand-in for `torch.cuda`: copies from it into pinned memory are queued."""

    def __init__(self):
        super().__init__()
        self.queued: list[Callable[[], Any]] = []
        self.ran = self.waits = self.pinned = 0

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> None:
        return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.pop("pin_memory", False):
            self.pinned += args[0]
        if func is Tensor.copy_ and kwargs.pop("non_blocking", False):
            target, source = args
            return self.queued.append(lambda: target.copy_(source))
        return func(*args, **kwargs)


@pytest.fixture
def gpu() -> Iterator[GPU]:
    with GPU() as gpu:
        yield gpu


def values() -> list[Tensor]:
    return [
        torch.arange(40, dtype=torch.float64),  # more than the buffer
        torch.tensor(7),
        torch.ones(3, dtype=torch.bool),
        torch.empty(0),
        torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
        torch.arange(4)[::2],  # with gaps
        torch.arange(2).expand(3, 2),
        *torch.arange(100).split(7),
    ]


@pytest.mark.parametrize("size", [16, 64, 1 << 20])
def test_values_and_layouts_arrive_whatever_the_size_of_the_buffer(gpu: GPU, size: int):
    stage = Staging(CPU, size, gpu)
    for _ in range(2):  # the buffer is used again
        copied = [stage.copy(one) for one in values()]
        stage.finish()
        for one, expected in zip(copied, values(), strict=True):
            assert torch.equal(one, expected) and one.dtype == expected.dtype
            assert one.stride() == expected.stride() or not expected.is_contiguous()
    assert gpu.pinned == size


def test_copies_go_into_the_tensors_that_are_given(gpu: GPU):
    stage = Staging(CPU, 16, gpu)
    given = [torch.full((5,), 9), torch.full((7,), 9)]
    copied = [stage.copy(torch.arange(len(one)), one) for one in given]
    stage.finish()
    assert all(one is other for one, other in zip(copied, given, strict=True))
    assert [one.tolist() for one in given] == [[*range(5)], [*range(7)]]


def test_what_is_changed_later_was_copied_before(gpu: GPU):
    stage = Staging(CPU, 64, gpu)
    weights = torch.arange(100)
    copied = stage.copy(weights)
    gpu.queued.append(lambda: weights.zero_())  # training goes on, on the same stream
    stage.finish()
    assert torch.equal(copied, torch.arange(100))


def test_many_small_tensors_are_waited_for_together(gpu: GPU):
    stage = Staging(CPU, 1 << 20, gpu)
    for number in range(1000):
        stage.copy(torch.tensor(number))
    assert gpu.waits == 0
    stage.finish()
    assert gpu.waits == 1


@pytest.mark.gpu
def test_a_gpu_gives_the_values_of_now_and_locks_no_more_memory():
    device = torch.device("cuda", torch.cuda.current_device())
    weights = [torch.randn(1000, 1000, device=device).to(dtype) for dtype in (torch.float32, torch.bfloat16)] * 20
    expected = [one.cpu() for one in weights]
    torch.cuda._sleep(500_000_000)  # the copies wait behind it
    copied = [staging(device).copy(one) for one in weights]
    for one in weights:
        one.zero_()
    staging(device).finish()
    assert all(torch.equal(one, other) and not one.is_pinned() for one, other in zip(copied, expected, strict=True))


def test_segments_grow_unless_the_environment_says_otherwise():
    program = "from runner.device.memory import grow_segments; grow_segments(); import os, sys; "
    program += "print([os.environ.get(one) for one in sys.argv[1:]], 'torch' in sys.modules)"
    names = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
    plain = {key: value for key, value in os.environ.items() if key not in names}

    def after(**environment: str) -> str:
        command = [sys.executable, "-c", program, *names]
        done = subprocess.run(command, env={**plain, **environment}, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    grown = "'expandable_segments:True'" if sys.platform == "linux" else "None"
    assert after() == f"[{grown}, None] False"
    assert after(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64") == "[None, 'max_split_size_mb:64'] False"
