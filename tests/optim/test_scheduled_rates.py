"""Schedules set the learning rates of an optimizer's parameter groups."""

from __future__ import annotations

import pytest
import torch

from runner.optim.scheduled_rates import ScheduledRates
from runner.optim.schedulers import constant, cosine_annealing, linear, multi_step
from runner.timing.time import Progress, Time, Timestamp


def sgd(*rates: float | torch.Tensor) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, foreach=False)


def test_schedules_multiply_the_base_rates_of_all_groups() -> None:
    optimizer = sgd(0.4, 0.1)
    rates = ScheduledRates(optimizer, [linear(), constant(0.5)])
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.1]
    rates.step(Progress(Timestamp(batch=10), Time(40, "ba")))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.15, 0.0375])
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.4, 0.1]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.8})
    rates.step(Progress(Timestamp(batch=20), Time(40, "ba")))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.025, 0.2])


def test_rates_adapt_when_the_length_of_training_changes() -> None:
    optimizer = sgd(1.0)
    rates = ScheduledRates(optimizer, [linear()])
    for max_duration, batches, rate in ((Time(2, "ep"), 10, 0.5), (Time(4, "ep"), 10, 0.75), (Time(4, "ep"), 5, 0.75)):
        rates.step(Progress(Timestamp(epoch=1, batch=10), max_duration, batches))
        assert optimizer.param_groups[0]["lr"] == rate
    rates.step(Progress(Timestamp(batch=5, batch_in_epoch=5), Time(2, "ep"), 10))
    assert optimizer.param_groups[0]["lr"] == 0.75


def test_tensor_rates_are_changed_in_place() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = sgd(rate)
    rates = ScheduledRates(optimizer, [linear()])
    rate = optimizer.param_groups[0]["lr"]
    for n in range(3):
        rates.step(Progress(Timestamp(batch=n), Time(4, "ba")))
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(0.5 * (1 - n / 4))
    assert rates.state_dict() == {"base_rates": [0.5]}


def test_rates_without_schedules_leave_the_optimizer_alone() -> None:
    optimizer = sgd(0.5)
    rates = ScheduledRates(optimizer, [])
    optimizer.param_groups[0]["lr"] = 0.125
    rates.step(Progress(Timestamp(), Time(4, "ba")))
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_base_rates_are_saved_and_loaded() -> None:
    progress = Progress(Timestamp(batch=1), Time(4, "ba"))
    first = ScheduledRates(sgd(0.4, 0.1), [cosine_annealing()])
    first.step(progress)
    optimizer = sgd(0.9, 0.9)
    second = ScheduledRates(optimizer, [cosine_annealing()])
    second.load_state_dict(first.state_dict())
    second.step(progress)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in first.optimizer.param_groups]
    with pytest.raises(ValueError, match=r"base_rates=\[0.4, 0.1\]"):
        ScheduledRates(sgd(0.4), []).load_state_dict(first.state_dict())


def test_the_state_of_an_optimizer_contains_the_base_rate() -> None:
    first = sgd(0.4)
    ScheduledRates(first, [linear()]).step(Progress(Timestamp(batch=3), Time(4, "ba")))
    second = sgd(0.9)
    rates = ScheduledRates(second, [linear()])
    second.load_state_dict(first.state_dict())
    rates.step(Progress(Timestamp(batch=2), Time(4, "ba")))
    assert second.param_groups[0]["lr"] == pytest.approx(0.2)


def test_a_schedule_in_epochs_of_unknown_length_warns_or_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    start, batches, epochs = Timestamp(), Time(20, "ba"), Time(2, "ep")
    for schedule, length in ((linear(), batches), (constant(0.5), epochs), (multi_step(["1ep"]), epochs)):
        ScheduledRates(sgd(1.0), [schedule]).step(Progress(start, length))
    ScheduledRates(sgd(1.0), [linear()]).step(Progress(start, epochs, 10))
    assert not caplog.messages
    ScheduledRates(sgd(1.0), [linear()]).step(Progress(start, epochs))
    assert "the data has no length, so the rate only changes between epochs" in caplog.text
    with pytest.raises(ValueError, match="and is 0 in the first; give trainer.max_duration"):
        ScheduledRates(sgd(1.0), [linear(t_warmup="0.1dur")]).step(Progress(start, epochs))
