"""The state within a batch: its attributes, microbatches, memory, and the changes of algorithms."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from loop_runs import Tokens, make_trainer
from torch import nn

from runner import Algorithm, Callback, Event


def test_batch_microbatch_outputs_and_loss_are_unset_before_they_exist():
    present: list[list[str]] = []

    class RecordsPresent(Callback):
        def run_event(self, event, state, logger):
            if event in (Event.FIT_START, Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.AFTER_FORWARD):
                names = ("batch", "microbatch", "outputs", "loss", "total_loss")
                present.append([name for name in names if hasattr(state, name)])

    with make_trainer(RecordsPresent(), max_duration="1ba") as trainer:
        with pytest.raises(AttributeError, match="batch"):
            _ = trainer.state.batch
        trainer.fit()
    assert present == [[], ["batch"], ["batch", "microbatch"], ["batch", "microbatch", "outputs"]]


def test_a_single_microbatch_is_the_batch_itself_and_several_are_views_of_it():
    starts: list[int] = []

    class ComparesMemory(Callback):
        def before_forward(self, state, logger):
            batch, microbatch = state.batch[0], state.microbatch[0]
            if state.grad_accum == 1:
                assert state.microbatch is state.batch
            assert microbatch.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
            assert torch.equal(microbatch, batch[state.microbatch_start : state.microbatch_start + len(microbatch)])
            starts.append(state.microbatch_start)

    for grad_accum in (1, 2):
        with make_trainer(ComparesMemory(), max_duration="1ba", grad_accum=grad_accum) as trainer:
            trainer.fit()
    assert starts == [0, 0, 1]


class OutOfMemoryBackward(torch.autograd.Function):
    """Copies its input; the backward pass of more than one sample runs out of memory."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if len(gradients[0]) > 1:
            raise OutOfMemoryBackward.kind(OutOfMemoryBackward.message)
        return gradients[0]

    kind: type[RuntimeError] = torch.OutOfMemoryError
    message = "out of memory"


class LimitedMemory(Tokens):
    """Runs out of memory in the backward pass of more than one sample."""

    def __init__(self):
        super().__init__(nn.Linear(3, 2), 2)

    def forward(self, batch):
        return OutOfMemoryBackward.apply(super().forward(batch))


def test_tensors_of_an_attempt_that_ran_out_of_memory_are_freed_before_the_next():
    class TensorsAlive(Callback):
        def __init__(self):
            self.tensors: list[weakref.ref[torch.Tensor]] = []
            self.alive: list[bool] = []

        def before_forward(self, state, logger):
            if state.microbatch_start == 0:
                self.alive.append(any(tensor() is not None for tensor in self.tensors))
                self.tensors = []

        def before_backward(self, state, logger):
            self.tensors += [weakref.ref(state.outputs), weakref.ref(state.loss)]

    callback = TensorsAlive()
    with make_trainer(callback, model=LimitedMemory(), microbatch_size="auto", max_duration="1ba") as trainer:
        trainer.fit()
    assert trainer.state.samples_per_microbatch == 1
    assert callback.alive == [False, False]


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_errors_of_cublas_and_cudnn_about_memory_halve_the_microbatches(monkeypatch: pytest.MonkeyPatch, message: str):
    def train() -> Any:
        with make_trainer(model=LimitedMemory(), microbatch_size="auto", max_duration="1ba") as trainer:
            trainer.fit()
        return trainer.state.samples_per_microbatch

    monkeypatch.setattr(OutOfMemoryBackward, "kind", RuntimeError)
    monkeypatch.setattr(OutOfMemoryBackward, "message", message)
    assert train() == 1
    monkeypatch.setattr(OutOfMemoryBackward, "message", "CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        train()


def test_algorithms_may_change_batch_loss_and_gradients():
    class Changes(Algorithm):
        def after_dataloader(self, state, logger):
            state.batch = (state.batch[0] * 0, state.batch[1])

        def after_loss(self, state, logger):
            assert isinstance(state.loss, torch.Tensor)
            state.loss = state.loss * 2

        def after_train_batch(self, state, logger):
            self.gradients = [p.grad.clone() for p in state.unwrapped_model.parameters() if p.grad is not None]

    for grad_accum in (1, 2):
        changes = Changes()
        with make_trainer(max_duration="1ba", algorithms=[changes], grad_accum=grad_accum) as trainer:
            bias = [*trainer.state.unwrapped_model.parameters()][1].detach().clone()
            trainer.fit()
        weight_gradient, bias_gradient = changes.gradients
        assert not weight_gradient.any()  # because the inputs are zero
        torch.testing.assert_close(bias_gradient, 2 * (torch.softmax(bias, 0) - torch.tensor([0.5, 0.5])))
