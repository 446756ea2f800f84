"""Copies beside the steps, on a stand-in for a GPU whose streams run as late, and in as bad an order, as they may."""

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

GARBAGE = 77  # in memory whose copy has not run yet
CPU = torch.device("cpu")


class Stream(torch.Stream):
    """Operations in order; each runs once those of other streams that it waits for have run."""

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
    """A stand-in for `torch.cuda`, and for a GPU whose memory is the host's."""

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
        """Run all that is queued, what is on the stream of the steps first wherever nothing forbids it."""
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
            arrived = torch.full_like(source, GARBAGE)
            self._current[-1].queue(lambda: arrived.copy_(source))
            return arrived
        return func(*args, **kwargs)


@pytest.fixture
def gpu() -> Iterator[GPU]:
    with GPU() as gpu:
        yield gpu


def windows() -> Tensor:
    return torch.arange(13).unfold(0, 4, 3)  # they overlap, as those of a text do


BATCHES: dict[str, Callable[[], Any]] = {
    "pair": lambda: (torch.arange(6).view(2, 3), torch.ones(2, dtype=torch.uint8)),
    "nested": lambda: {"x": [torch.arange(4.0), None], "length": 3},
    "overlapping": windows,
    "columns first": lambda: torch.arange(6).view(2, 3).T,
    "of transformers": lambda: UserDict(input_ids=torch.arange(8), attention_mask=torch.ones(8)),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_steps_see_whole_batches_and_nothing_is_copied_from_pageable_memory(gpu: GPU, kind: str):
    prefetch = Prefetch(CPU, gpu)
    seen: list[list[Tensor]] = []
    for _ in range(3):
        batch = prefetch(BATCHES[kind]())
        gpu.steps.queue(lambda batch=batch: seen.append([one.clone() for one in held(batch)]))
        assert {id(one) for one in held(batch)} == {tensor for tensor, stream in gpu.recorded if stream is gpu.steps}
        gpu.recorded.clear()
    gpu.run()
    expected = held(BATCHES[kind]())
    assert len(seen) == 3 and gpu.copied_from_pageable == 0
    for batch in seen:
        for one, other in zip(batch, expected, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype


def held(batch: Any) -> list[Tensor]:
    return [*tensors(batch.data if isinstance(batch, UserDict) else batch)]


def test_a_copy_does_not_wait_for_the_steps_before_it(gpu: GPU):
    prefetch = Prefetch(CPU, gpu)
    gpu.steps.queue(lambda: None)
    batch = prefetch(torch.arange(4))
    copies = gpu.streams[-1]
    while copies.step():
        pass
    assert gpu.steps.ran == 0 and batch.tolist() == [0, 1, 2, 3]


def test_what_is_pinned_already_is_copied_from_where_it_is(gpu: GPU):
    batch = torch.empty_like(torch.arange(4), pin_memory=True).fill_(3)
    Prefetch(CPU, gpu)(batch)
    assert len(gpu.pinned) == 1 and gpu.copied_from_pageable == 0


def test_objects_and_tensors_that_are_not_plain_move_on_the_stream_of_the_steps(gpu: GPU):
    class Graphs:
        def to(self, device: torch.device) -> Graphs:
            gpu.current_stream(device).queue(lambda: None)
            return self

    graphs = Graphs()
    assert Prefetch(CPU, gpu)({"graphs": graphs})["graphs"] is graphs
    Prefetch(CPU, gpu)(torch.ones(2, requires_grad=True))
    assert len(gpu.steps.queued) == 2 and not any(stream.queued for stream in gpu.streams[1:])


def test_the_objects_of_a_mapping_keep_their_class_and_the_batch_that_was_read_stays(gpu: GPU):
    read = UserDict(input_ids=torch.arange(3))
    batch = Prefetch(CPU, gpu)(read)
    gpu.run()
    assert type(batch) is UserDict and batch is not read and batch["input_ids"] is not read["input_ids"]


def test_there_is_none_on_the_cpu():
    assert not isinstance(mover(CPU), Prefetch)
    batch = torch.arange(3)
    assert mover(CPU)(batch) is batch


@pytest.mark.gpu
def test_a_gpu_gets_a_pageable_batch_while_it_is_busy_and_the_host_does_not_wait():
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
