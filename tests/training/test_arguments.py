"""Checks of the Trainer's arguments: durations, hooks and models."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tiny_runs import tiny_trainer as make_trainer
from torch import nn

from runner import Callback, ClassificationModel, LanguageModel, Model, Time
from runner.algorithms import EMA
from runner.callbacks import InMemoryLogger, SpeedMonitor
from runner.data import TensorLoader
from runner.training.arguments import check_arguments, check_duration, check_iteration_length, check_model

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_duration": "0ep"}, "max_duration='0ep': must be more than 0"),
    ({"max_duration": "0.5dur"}, "max_duration='0.5dur': must be more than 0, in ep, ba, sp, tok or seconds"),
    ({"max_duration": "3iter"}, "max_duration='3iter'"),
    ({"max_duration": "5"}, "max_duration='5' is not a time.*'5ep'"),
    ({"max_duration": "1.5ep"}, "max_duration='1.5ep' is not a time"),
    ({"max_duration": -1}, "max_duration=-1 is not a time|max_duration=.*not a time"),
    ({"eval_interval": "2 ep"}, "eval_interval='2 ep' is not a time"),
    ({"iteration_length": "4ba"}, "iteration_length='4ba': must be in epochs"),
    ({"iteration_length": 0}, "iteration_length=0: must be in epochs and more than 0"),
    ({"precision": "fp61"}, "precision='fp61': must be one of 'fp32'"),
    ({"grad_accum": 0}, "grad_accum=0: must be a whole number, at least 1"),
    ({"grad_accum": True}, "grad_accum=True: must be a whole number"),
    ({"microbatch_size": 0}, "microbatch_size=0: must be 'auto' or a whole number, at least 1, or None"),
    ({"microbatch_size": "big"}, "microbatch_size='big'"),
    ({"microbatch_size": 2, "grad_accum": 2}, "grad_accum=2 and microbatch_size=2 cannot be combined"),
    ({"device": "gpu"}, "device='gpu': must be 'auto', 'cpu'"),
    ({"scale_schedule_ratio": 0}, "ratio=0 must be"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_check_arguments_and_the_trainer_refuse_a_wrong_argument(wrong: dict, message: str):
    with pytest.raises((ValueError, TypeError), match=message):
        check_arguments(**wrong)
    with pytest.raises((ValueError, TypeError), match=message):
        make_trainer(**wrong)


@pytest.mark.parametrize("seed", [-1, 1.5, "1", True, None])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(ValueError, match=f"seed={seed!r}: must be a whole number, at least 0"):
        check_arguments(seed=seed)
    with pytest.raises(ValueError, match=f"seed={seed!r}: must be a whole number, at least 0"):
        make_trainer(seed=seed)


def test_valid_arguments_are_accepted():
    check_arguments()
    check_arguments(max_duration="90m", eval_interval=0, iteration_length=2, grad_accum=4, seed=2**40)
    assert check_duration(3) == "3ep" and check_duration("1h30m") == Time(5400, "sec")
    assert check_iteration_length(None) is None and check_iteration_length("2ep") == check_iteration_length(2)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("callbacks", SpeedMonitor, "callbacks=SpeedMonitor: this is a class; pass an instance"),
        ("callbacks", [SpeedMonitor], "callbacks=SpeedMonitor: this is a class"),
        ("callbacks", EMA(), "callbacks=EMA: belongs in algorithms, because it is a subclass of runner.Algorithm"),
        ("callbacks", {"mine": EMA()}, "callbacks.mine=EMA: belongs in algorithms"),
        ("callbacks", "speed_monitor", "callbacks='s': must be an instance of a subclass of runner.Callback"),
        ("callbacks", [object()], "callbacks=object: must be an instance of a subclass of runner.Callback"),
        ("callbacks", [None], "callbacks=None: must be an instance of a subclass of runner.Callback"),
        ("algorithms", [SpeedMonitor()], "algorithms=SpeedMonitor: belongs in callbacks"),
        ("algorithms", {"ema": "EMA"}, "algorithms.ema='EMA': must be an instance of a subclass of runner.Algorithm"),
        ("loggers", [SpeedMonitor()], "loggers=SpeedMonitor: belongs in callbacks"),
    ],
)
def test_hooks_of_another_kind_are_refused(argument: str, value, message: str):
    with pytest.raises(TypeError, match=re.escape(message)):
        make_trainer(**{argument: value})


def test_hooks_can_be_an_instance_a_sequence_a_mapping_or_none():
    for empty in (None, (), [], {}):
        with make_trainer(callbacks=empty, algorithms=empty, loggers=empty) as trainer:
            assert trainer.state.algorithms == trainer.state.loggers == ()
    callback, memory = Callback(), InMemoryLogger()
    for callbacks in (callback, [callback], (callback,), {"mine": callback}):
        with make_trainer(callbacks=callbacks, loggers=memory) as trainer:
            assert callback in trainer.state.callbacks and trainer.state.loggers == (memory,)


def test_a_duration_in_tokens_needs_a_model_that_counts_them():
    message = "max_duration='100tok': ClassificationModel does not count tokens; override"
    with make_trainer(max_duration="100tok") as trainer, pytest.raises(ValueError, match=message):
        trainer.fit()
    with make_trainer() as trainer, pytest.raises(ValueError, match="does not count tokens"):
        trainer.fit(duration="1tok")

    tokens = TensorLoader(
        torch.zeros(4, 5, dtype=torch.long), torch.zeros(4, 5, dtype=torch.long), batch_size=2, shuffle=False
    )
    model = LanguageModel(nn.Embedding(7, 7))
    with make_trainer(model=model, train_dataloader=tokens, max_duration="10tok") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.token == 10


class ValidModel(Model):
    def forward(self, batch: Any) -> Any:
        return batch

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs


class TwoInputs(ValidModel):
    def forward(self, x: Any, y: Any) -> Any:  # type: ignore[override]
        return x


class NoArgument(ValidModel):
    def metrics(self) -> Any:  # type: ignore[override]
        return {}


class StepWithBatch(ValidModel):
    def training_step(self, batch: Any, index: int) -> Any:  # type: ignore[override]
        return batch


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TwoInputs, r"TwoInputs.forward cannot be called as forward\(batch\): define forward\(self, batch\)"),
        (NoArgument, r"NoArgument.metrics cannot be called as metrics\(train\): define metrics\(self, train\)"),
        (StepWithBatch, r"StepWithBatch.training_step cannot be called as training_step\(state\)"),
    ],
)
def test_a_model_whose_methods_have_other_parameters_is_refused(kind: type[Model], message: str):
    check_model(ValidModel())
    with pytest.raises(TypeError, match=message):
        check_model(kind())


def test_a_lazy_module_that_has_not_run_is_refused():
    model = ClassificationModel(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)), 3)
    with pytest.raises(ValueError, match=r"model=ClassificationModel: module.0.weight has no shape yet; run a batch"):
        check_model(model)
    model.module(torch.zeros(1, 7))
    check_model(model)
    norm = nn.LazyBatchNorm1d(affine=False)  # without parameters, but with buffers
    with pytest.raises(ValueError, match=r"model=ClassificationModel: module.running_mean has no shape yet"):
        check_model(ClassificationModel(norm, 3))
