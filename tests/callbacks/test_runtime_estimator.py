from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_runs import tiny_trainer
from torch import nn

from runner import Callback, ClassificationModel, Evaluator, Trainer, save_checkpoint
from runner.callbacks import InMemoryLogger, RuntimeEstimator
from runner.callbacks.runtime_estimator import runs_left

BATCH = 0.06  # seconds to load a batch
EVALUATION = 0.15  # seconds to evaluate a batch
KEY = "time/remaining_estimate"


class Slow(ClassificationModel):
    """Takes `EVALUATION` seconds to evaluate a batch."""

    def __init__(self):
        super().__init__(nn.Linear(3, 2), 2)

    def eval_forward(self, batch, outputs=None):
        time.sleep(EVALUATION)
        return super().eval_forward(batch, outputs)

    def num_tokens(self, batch):
        return 5 * len(batch[0])


class Quick(Slow):
    """Evaluates batches without waiting."""

    def eval_forward(self, batch, outputs=None):
        return self(batch)


class SlowLoader:
    """A loader of `batches` batches of four samples; the first takes ten times as long."""

    def __init__(self, batches: int, seconds: float = BATCH):
        self.batches = batches
        self.seconds = seconds
        self.first = 10 * seconds

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches):
            time.sleep(self.first or self.seconds)
            self.first = 0.0
            yield torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


class Unsized(SlowLoader):
    """A loader without a length."""

    __len__ = None  # type: ignore[assignment]


class Clock(Callback):
    """Records the end of each batch, and how many evaluations of the first evaluator were done and left then."""

    def __init__(self, batches: int = 0) -> None:
        self.batches = batches
        self.ended: list[float] = []
        self.runs = 0
        self.evaluations: list[tuple[int, int]] = []

    def batch_end(self, state, logger):
        self.ended.append(time.perf_counter())
        (evaluator, *_) = state.evaluators or [None]
        if evaluator is not None and self.batches:
            self.evaluations.append((self.runs, runs_left(evaluator, state, self.batches)))

    def eval_end(self, state, logger):
        self.runs += state.dataloader_label == state.evaluators[0].label

    def fit_end(self, state, logger):
        self.over = time.perf_counter()


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": Slow(),
        "train_dataloader": SlowLoader(5),
        "max_duration": "8ep",
        "callbacks": callbacks,
    }
    return tiny_trainer(**(defaults | arguments))


def sample(batches: int) -> list[Any]:
    return [(torch.ones(1, 3), torch.zeros(1, dtype=torch.int64))] * batches


@pytest.mark.usefixtures("steady")
def test_the_estimate_equals_the_remaining_time_of_the_run():
    clock, memory = Clock(), InMemoryLogger()
    evaluators = [Evaluator("eval", sample(1)), Evaluator("long", sample(6), eval_interval="3ep")]  # also at the end
    monitor = RuntimeEstimator(time_unit="seconds")
    with make_trainer(clock, monitor, eval_dataloader=evaluators, loggers=[memory]) as trainer:
        trainer.fit()
    steps, values = memory.get_timeseries(KEY)
    assert steps == [*range(2, 41), 40]  # the first batch is skipped
    left = {step: clock.over - ended for step, ended in enumerate(clock.ended, 1)}
    assert values[steps.index(20)] == pytest.approx(left[20], rel=1e-6)
    assert values[steps.index(35)] == pytest.approx(left[35], rel=1e-6)
    assert values[-2] == pytest.approx(7 * EVALUATION, rel=1e-6)  # of both evaluators, after the last batch
    assert values[-1] == 0


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("unit", [1, 60, 3600, 86400])
def test_without_evaluations_the_estimate_falls_by_the_time_of_a_batch(unit: int):
    name = {1: "seconds", 60: "minutes", 3600: "hours", 86400: "days"}[unit]
    memory, loader = InMemoryLogger(), SlowLoader(5)
    loader.first = 0.0
    arguments = {"train_dataloader": loader, "max_duration": "10ba", "loggers": [memory]}
    with make_trainer(RuntimeEstimator(0, name), **arguments) as trainer:
        trainer.fit()
    steps, values = memory.get_timeseries(KEY)
    assert steps == [*range(1, 11)]
    assert [value * unit for value in values] == pytest.approx([(10 - step) * BATCH for step in steps])


@pytest.mark.parametrize(
    ("max_duration", "batches"), [("4ep", 20), ("17ba", 17), ("70sp", 18), ("350tok", 18), ("5ba", 5)]
)
@pytest.mark.parametrize(
    "interval", ["1ep", "3ep", "1ba", "4ba", "7ba", "16sp", "60tok", "0.25dur", "0.3dur", "0.1dur", 0, 2]
)
def test_runs_left_is_the_number_of_later_evaluations(max_duration: str, batches: int, interval: Any):
    clock = Clock(batches)
    evaluators = [Evaluator("eval", sample(1), eval_interval=interval)]
    arguments = {"train_dataloader": SlowLoader(5, 0.0), "eval_dataloader": evaluators, "max_duration": max_duration}
    with make_trainer(clock, model=Quick(), **arguments) as trainer:
        trainer.fit()
    assert [done + left for done, left in clock.evaluations] == [clock.runs] * len(clock.evaluations)


@pytest.mark.usefixtures("steady")
def test_a_loader_without_a_length_is_estimated_by_its_last_epoch():
    memory, clock = InMemoryLogger(), Clock()
    arguments = {"train_dataloader": Unsized(5), "max_duration": "4ep", "loggers": [memory]}
    with make_trainer(clock, RuntimeEstimator(time_unit="seconds"), **arguments) as trainer:
        trainer.fit()
    steps, values = memory.get_timeseries(KEY)
    assert steps == [*range(6, 21)]
    assert values[steps.index(10)] == pytest.approx(clock.over - clock.ended[9], rel=1e-6)
    assert values[-1] == 0


@pytest.mark.usefixtures("steady")
def test_a_run_of_few_short_batches_has_estimates():
    memory, loader = InMemoryLogger(), SlowLoader(4, 0.004)
    loader.first = 0.0
    arguments = {"train_dataloader": loader, "max_duration": "4ba", "loggers": [memory]}
    with make_trainer(RuntimeEstimator(time_unit="seconds"), **arguments) as trainer:
        trainer.fit()
    steps, values = memory.get_timeseries(KEY)
    assert steps == [2, 4]  # once the rate is known, and at the end
    assert values == pytest.approx([2 * 0.004, 0])


def test_the_last_estimate_of_a_stopped_run_is_zero():
    class Stop(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 7:
                state.stop_training()

    memory = InMemoryLogger()
    with make_trainer(RuntimeEstimator(), Stop(), loggers=[memory]) as trainer:
        trainer.fit()
    steps, values = memory.get_timeseries(KEY)
    assert steps == [*range(2, 8), 7]
    assert values[-2] > 0 and values[-1] == 0


def test_the_estimate_by_a_real_clock_is_at_least_the_loading_time():
    memory, loader = InMemoryLogger(), SlowLoader(5)
    with make_trainer(RuntimeEstimator(0, "seconds"), train_dataloader=loader, loggers=[memory]) as trainer:
        trainer.fit("1ep")
    steps, values = memory.get_timeseries(KEY)
    left = [(5 - step) * (10 * BATCH + (step - 1) * BATCH) / step for step in range(1, 6)]  # the first batch is slow
    assert steps == [*range(1, 6)]
    assert all(value >= least for value, least in zip(values, left, strict=True))


@pytest.mark.usefixtures("steady")
def test_a_resumed_run_estimates_from_rates_before_the_checkpoint(tmp_path):
    arguments = {"eval_dataloader": Evaluator("eval", sample(4)), "max_duration": "4ep"}
    with make_trainer(RuntimeEstimator(time_unit="seconds"), **arguments) as first:
        first.fit(duration="2ep")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    clock, memory = Clock(), InMemoryLogger()
    arguments |= {"loggers": [memory], "resume_path": tmp_path / "checkpoint"}
    with make_trainer(clock, RuntimeEstimator(time_unit="seconds"), **arguments) as second:
        second.fit()
    steps, values = memory.get_timeseries(KEY)
    assert steps[0] == 11  # from the first batch, because the rate is known
    # Evaluations count, although none has run since the checkpoint; the slow first batch does not count.
    assert values[0] == pytest.approx(clock.over - clock.ended[0], rel=1e-6)


def test_ranks_estimate_by_the_clock_of_rank_zero(run_ranks):
    def program():
        import time

        import torch
        from tiny_runs import tiny_trainer

        from runner import Callback, Evaluator, get_global_rank
        from runner.callbacks import InMemoryLogger, RuntimeEstimator
        from runner.data import TensorLoader

        now = [0.0]
        time.perf_counter = lambda: now[0]  # a clock of each rank, independent of the machine's load

        class Wait(Callback):
            def batch_start(self, state, logger):
                now[0] += 0.06

            eval_batch_start = batch_start

        torch.manual_seed(0)
        memory = InMemoryLogger()
        data = TensorLoader(torch.randn(24, 3), torch.arange(24) % 2, batch_size=4, shuffle=False)
        with tiny_trainer(
            train_dataloader=data,
            eval_dataloader=Evaluator("eval", data),  # six batches, after six of training
            max_duration="4ep",
            callbacks=[Wait(), RuntimeEstimator(time_unit="seconds")],
            loggers=[memory],
        ) as trainer:
            trainer.fit()
        steps, values = memory.get_timeseries("time/remaining_estimate")
        assert steps == [*range(2, 25), 24]
        print(values[steps.index(12)] / (12 + 18) / 0.06, values[-1], get_global_rank())

    for rank, process in enumerate(run_ranks(program)):
        ratio, last, printed = process.stdout.split()
        assert float(ratio) == pytest.approx(1) and float(last) == 0 and int(printed) == rank


@pytest.mark.parametrize("arguments", [{"skip_batches": -1}, {"skip_batches": 1.5}, {"time_unit": "weeks"}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        RuntimeEstimator(**arguments)
