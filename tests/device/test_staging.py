"""Copies to the host through a pinned buffer, on a simulated GPU that runs copies as late as it can."""

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
    """When it is synchronized, runs the operations that were queued before it was recorded."""

    def __init__(self, gpu: GPU):
        self.gpu = gpu
        self.count = 0

    def record(self, stream: Any) -> None:
        self.count = len(self.gpu.queued)

    def synchronize(self) -> None:
        self.gpu.waits += 1
        while self.gpu.ran < self.count:
            self.gpu.queued[self.gpu.ran]()
            self.gpu.ran += 1


class GPU(TorchFunctionMode):
    """Stands in for `torch.cuda`: copies from the GPU into pinned memory are queued."""

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
def test_tensors_of_any_layout_are_copied_through_buffers_of_any_size(gpu: GPU, size: int):
    stage = Staging(CPU, size, gpu)
    for _ in range(2):  # the second round reuses the buffer
        copied = [stage.copy(value) for value in values()]
        stage.finish()
        for copy, expected in zip(copied, values(), strict=True):
            assert torch.equal(copy, expected) and copy.dtype == expected.dtype
            assert copy.stride() == expected.stride() or not expected.is_contiguous()
    assert gpu.pinned == size


def test_copies_can_be_written_into_existing_tensors(gpu: GPU):
    stage = Staging(CPU, 16, gpu)
    targets = [torch.full((5,), 9), torch.full((7,), 9)]
    copied = [stage.copy(torch.arange(len(target)), target) for target in targets]
    stage.finish()
    assert all(copy is target for copy, target in zip(copied, targets, strict=True))
    assert [target.tolist() for target in targets] == [[*range(5)], [*range(7)]]


def test_a_later_change_of_the_weights_is_not_copied(gpu: GPU):
    stage = Staging(CPU, 64, gpu)
    weights = torch.arange(100)
    copied = stage.copy(weights)
    gpu.queued.append(lambda: weights.zero_())  # training continues on the same stream
    stage.finish()
    assert torch.equal(copied, torch.arange(100))


def test_the_copies_of_many_small_tensors_wait_once(gpu: GPU):
    stage = Staging(CPU, 1 << 20, gpu)
    for number in range(1000):
        stage.copy(torch.tensor(number))
    assert gpu.waits == 0
    stage.finish()
    assert gpu.waits == 1


@pytest.mark.gpu
def test_copies_from_a_gpu_have_earlier_values_and_are_not_pinned():
    device = torch.device("cuda", torch.cuda.current_device())
    weights = [torch.randn(1000, 1000, device=device).to(dtype) for dtype in (torch.float32, torch.bfloat16)] * 20
    expected = [weight.cpu() for weight in weights]
    torch.cuda._sleep(500_000_000)  # delays the copies
    copied = [staging(device).copy(weight) for weight in weights]
    for weight in weights:
        weight.zero_()
    staging(device).finish()
    assert all(map(torch.equal, copied, expected)) and not any(copy.is_pinned() for copy in copied)


def test_segments_are_expandable_unless_the_environment_sets_the_allocator():
    program = "from runner.device.memory import grow_segments; grow_segments(); import os, sys; "
    program += "print([os.environ.get(name) for name in sys.argv[1:]], 'torch' in sys.modules)"
    names = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
    others = {key: value for key, value in os.environ.items() if key not in names}

    def output(**variables: str) -> str:
        command = [sys.executable, "-c", program, *names]
        finished = subprocess.run(command, env={**others, **variables}, capture_output=True, text=True, check=True)
        return finished.stdout.strip()

    expandable = "'expandable_segments:True'" if sys.platform == "linux" else "None"
    assert output() == f"[{expandable}, None] False"
    assert output(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64") == "[None, 'max_split_size_mb:64'] False"
