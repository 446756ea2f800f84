"""Within one batch: what the state holds when, how microbatches share it, and what algorithms may change."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from loop_runs import Tokens, make_trainer
from torch import nn

from runner import Algorithm, Callback, Event


def test_what_is_in_flight_is_unset_before_it_exists():
    seen: list[dict[str, bool]] = []

    class Looks(Callback):
        def run_event(self, event, state, logger):
            if event in (Event.FIT_START, Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.AFTER_FORWARD):
                names = ("batch", "microbatch", "outputs", "loss", "total_loss")
                seen.append({name: hasattr(state, name) for name in names})

    with make_trainer(Looks(), max_duration="1ba") as trainer:
        with pytest.raises(AttributeError, match="batch"):
            _ = trainer.state.batch
        trainer.fit()
    assert [sum(one.values()) for one in seen] == [0, 1, 2, 3]


def test_one_microbatch_is_the_batch_itself_and_several_are_views_of_it():
    starts: list[int] = []

    class Looks(Callback):
        def before_forward(self, state, logger):
            batch, microbatch = state.batch[0], state.microbatch[0]
            if state.grad_accum == 1:
                assert state.microbatch is state.batch
            assert microbatch.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
            assert torch.equal(microbatch, batch[state.microbatch_start : state.microbatch_start + len(microbatch)])
            starts.append(state.microbatch_start)

    for grad_accum in (1, 2):
        with make_trainer(Looks(), max_duration="1ba", grad_accum=grad_accum) as trainer:
            trainer.fit()
    assert starts == [0, 0, 1]


class _NoRoomBackward(torch.autograd.Function):
    """Passes one sample through; of more, the gradient has no room in memory."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if len(gradients[0]) > 1:
            raise _NoRoomBackward.kind(_NoRoomBackward.message)
        return gradients[0]

    kind: type[RuntimeError] = torch.OutOfMemoryError
    message = "out of memory"


def test_nothing_of_an_attempt_that_ran_out_of_memory_is_kept_while_the_next_one_runs():
    class Lean(Tokens):
        def forward(self, batch):
            return _NoRoomBackward.apply(super().forward(batch))

    class Watch(Callback):
        def __init__(self):
            self.computed: list[weakref.ref[torch.Tensor]] = []
            self.alive: list[bool] = []

        def before_forward(self, state, logger):
            if state.microbatch_start == 0:
                self.alive.append(any(one() is not None for one in self.computed))
                self.computed = []

        def before_backward(self, state, logger):
            self.computed += [weakref.ref(state.outputs), weakref.ref(state.loss)]

    watch = Watch()
    with make_trainer(watch, model=Lean(nn.Linear(3, 2), 2), microbatch_size="auto", max_duration="1ba") as trainer:
        trainer.fit()
    assert trainer.state.samples_per_microbatch == 1
    assert watch.alive == [False, False]


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
def test_libraries_run_out_of_memory_in_words_of_their_own(monkeypatch: pytest.MonkeyPatch, message: str):
    class Lean(Tokens):
        def forward(self, batch):
            return _NoRoomBackward.apply(super().forward(batch))

    def train() -> Any:
        model = Lean(nn.Linear(3, 2), 2)
        with make_trainer(model=model, microbatch_size="auto", max_duration="1ba") as trainer:
            trainer.fit()
        return trainer.state.samples_per_microbatch

    monkeypatch.setattr(_NoRoomBackward, "kind", RuntimeError)
    monkeypatch.setattr(_NoRoomBackward, "message", message)
    assert train() == 1
    monkeypatch.setattr(_NoRoomBackward, "message", "CUDA error: an illegal memory access")
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
            _, bias = (one.detach().clone() for one in trainer.state.unwrapped_model.parameters())
            trainer.fit()
        weight_gradient, bias_gradient = changes.gradients
        assert not weight_gradient.any(), "inputs of zero"
        torch.testing.assert_close(bias_gradient, 2 * (torch.softmax(bias, 0) - torch.tensor([0.5, 0.5])))
