"""Copies of batches to a GPU during training steps, on a simulated GPU that runs its streams in the worst order."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runner.device.batch import tensors
from runner.device.prefetch import Prefetch, mover

GARBAGE = 77  # fills memory whose copy has not run yet
CPU = torch.device("cpu")


class Stream(torch.Stream):
    """Runs its operations in order, each after those operations of other streams that it waits for."""

    def __new__(cls):
        return super().__new__(cls, stream_id=0, device_index=0, device_type=0)

    def __init__(self):
        self.queued: list[tuple[Callable[[], Any], list[tuple[Stream, int]]]] = []
        self.ran = 0
        self.waits: list[tuple[Stream, int]] = []

    def queue(self, operation: Callable[[], Any]) -> None:
        self.queued.append((operation, self.waits))
        self.waits = []

    def wait_stream(self, other: torch.Stream) -> None:
        assert isinstance(other, Stream)
        self.waits.append((other, len(other.queued)))

    def step(self) -> bool:
        if self.ran == len(self.queued):
            return False
        operation, waits = self.queued[self.ran]
        if any(other.ran < count for other, count in waits):
            return False
        operation()
        self.ran += 1
        return True


class GPU(TorchFunctionMode):
    """Stands in for `torch.cuda`, with a simulated GPU whose memory is that of the host."""

    def __init__(self):
        super().__init__()
        self.steps = Stream()
        self.streams = [self.steps]
        self._current = [self.steps]
        self.pinned: set[int] = set()
        self.copied_from_pageable = 0
        self.recorded: list[tuple[int, Stream]] = []

    def Stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def run(self) -> None:
        """Run all queued operations; those of the training steps run before copies that they do not wait for."""
        while any(stream.step() for stream in self.streams):
            pass
        assert all(stream.ran == len(stream.queued) for stream in self.streams)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty_like and kwargs.pop("pin_memory", False):
            buffer = func(*args, **kwargs)
            self.pinned.add(buffer.data_ptr())
            return buffer
        if func is Tensor.is_pinned:
            return args[0].data_ptr() in self.pinned
        if func is Tensor.record_stream:
            return self.recorded.append((id(args[0]), args[1]))
        if func is Tensor.to:
            source = args[0]
            self.copied_from_pageable += source.data_ptr() not in self.pinned
            target = torch.full_like(source, GARBAGE)
            self._current[-1].queue(lambda: target.copy_(source))
            return target
        return func(*args, **kwargs)


@pytest.fixture
def gpu() -> Iterator[GPU]:
    with GPU() as gpu:
        yield gpu


BATCHES: dict[str, Callable[[], Any]] = {
    "pair": lambda: (torch.arange(6).view(2, 3), torch.ones(2, dtype=torch.uint8)),
    "nested": lambda: {"x": [torch.arange(4.0), None], "length": 3},
    "overlapping": lambda: torch.arange(13).unfold(0, 4, 3),  # as windows of a text
    "columns first": lambda: torch.arange(6).view(2, 3).T,
    "transformers": lambda: UserDict(input_ids=torch.arange(8), attention_mask=torch.ones(8)),
}


def tensors_in(batch: Any) -> list[Tensor]:
    return [*tensors(batch.data if isinstance(batch, UserDict) else batch)]


@pytest.mark.parametrize("kind", BATCHES)
def test_steps_read_complete_batches_and_all_copies_come_from_pinned_memory(gpu: GPU, kind: str):
    prefetch = Prefetch(CPU, gpu)
    batches: list[list[Tensor]] = []
    for _ in range(3):
        copied = tensors_in(prefetch(BATCHES[kind]()))
        gpu.steps.queue(lambda copied=copied: batches.append([tensor.clone() for tensor in copied]))
        assert {*map(id, copied)} == {tensor for tensor, stream in gpu.recorded if stream is gpu.steps}
        gpu.recorded.clear()
    gpu.run()
    assert len(batches) == 3 and gpu.copied_from_pageable == 0
    for batch in batches:
        torch.testing.assert_close(batch, tensors_in(BATCHES[kind]()), rtol=0, atol=0)


def test_a_copy_does_not_wait_for_earlier_steps(gpu: GPU):
    prefetch = Prefetch(CPU, gpu)
    gpu.steps.queue(lambda: None)
    batch = prefetch(torch.arange(4))
    copies = gpu.streams[-1]
    while copies.step():
        pass
    assert gpu.steps.ran == 0 and batch.tolist() == [0, 1, 2, 3]


def test_a_pinned_batch_is_copied_without_another_pinned_buffer(gpu: GPU):
    batch = torch.empty_like(torch.arange(4), pin_memory=True).fill_(3)
    Prefetch(CPU, gpu)(batch)
    assert len(gpu.pinned) == 1 and gpu.copied_from_pageable == 0


def test_objects_and_tensors_that_require_gradients_move_on_the_stream_of_the_steps(gpu: GPU):
    class Graphs:
        def to(self, device: torch.device) -> Graphs:
            gpu.current_stream(device).queue(lambda: None)
            return self

    graphs = Graphs()
    assert Prefetch(CPU, gpu)({"graphs": graphs})["graphs"] is graphs
    Prefetch(CPU, gpu)(torch.ones(2, requires_grad=True))
    assert len(gpu.steps.queued) == 2 and not any(stream.queued for stream in gpu.streams[1:])


def test_a_mapping_is_copied_to_a_mapping_of_its_class(gpu: GPU):
    batch = UserDict(input_ids=torch.arange(3))
    copied = Prefetch(CPU, gpu)(batch)
    gpu.run()
    assert type(copied) is UserDict and copied is not batch and copied["input_ids"] is not batch["input_ids"]


def test_batches_are_not_copied_on_the_cpu():
    assert not isinstance(mover(CPU), Prefetch)
    batch = torch.arange(3)
    assert mover(CPU)(batch) is batch


@pytest.mark.gpu
def test_a_pageable_batch_is_copied_to_a_busy_gpu_without_waiting():
    device = torch.device("cuda", torch.cuda.current_device())
    prefetch = mover(device)
    assert isinstance(prefetch, Prefetch)
    images = torch.arange(1 << 22, dtype=torch.int32)
    prefetch(images)  # allocates pinned memory, which may wait
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # clock ticks: about a second
    busy.record()
    batch = prefetch(images)
    prefetch._stream.synchronize()
    assert not busy.query()
    assert torch.equal(batch.cpu(), images)
    assert busy.query()
