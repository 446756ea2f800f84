"""The order of events for durations and loaders of all kinds, and the timestamps at these events."""

from __future__ import annotations

import time

import pytest
import torch
from loop_runs import PER_EPOCH, Trace, fit_events, make_data, make_trainer

from runner import Callback, Evaluator
from runner.data import TensorLoader


class Unsized:
    """A loader that does not say how long it is."""

    def __init__(self, batches: int = PER_EPOCH):
        self.batches = batches

    def __iter__(self):
        return iter([*make_data(self.batches)])


def test_all_events_of_a_small_run_are_in_order():
    trace = Trace()
    data = make_data(2)
    evaluation = [Evaluator("val", make_data(1), eval_interval="1ep")]
    with make_trainer(trace, train_dataloader=data, eval_dataloader=evaluation, grad_accum=2) as trainer:
        assert trace.take() == ["INIT", "BEFORE_LOAD", "AFTER_LOAD"]
        trainer.fit(duration="3ba")
    microbatches = """
        BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
        BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
    """
    evaluation_of_val = """
        EVAL_BEFORE_ALL EVAL_START val EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
        EVAL_AFTER_ALL
    """
    assert (
        " ".join(trace.events).split()
        == f"""
        FIT_START ITERATION_START EPOCH_START
        BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH {microbatches}
        AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT
        BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH {microbatches}
        AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT
        BEFORE_DATALOADER
        EPOCH_END {evaluation_of_val} EPOCH_CHECKPOINT
        EPOCH_START
        BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH {microbatches}
        AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT
        {evaluation_of_val} FIT_END
    """.split()
    )


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize(
    ("duration", "batches"),
    [
        ("1ba", 1),
        ("6ba", 6),
        ("12sp", 6),
        ("11sp", 6),
        ("36tok", 6),
        ("31tok", 6),
        ("4ba", 4),
        ("8ba", 8),
        ("16sp", 8),
        ("15sp", 8),
        ("48tok", 8),
        ("1ep", 4),
        ("2ep", 8),
    ],
)
def test_events_are_in_order_for_each_unit_of_the_duration(duration: str, batches: int, microbatches: int):
    trace = Trace()
    data = TensorLoader(torch.ones(16, 3), torch.zeros(16, dtype=torch.long), batch_size=4, shuffle=False)
    if duration.endswith(("sp", "tok")):
        count, unit = int(duration.rstrip("sptok")), duration.lstrip("0123456789")
        duration = f"{2 * count}{unit}"  # batches have four samples here, not two, to allow four microbatches
    with make_trainer(trace, train_dataloader=data, max_duration=duration, grad_accum=microbatches) as trainer:
        trace.take()
        trainer.fit()
    finds_end = duration.endswith("ep")
    assert trace.events == fit_events(batches, microbatches=microbatches, finds_end=finds_end)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("batches", [6, 8])
def test_events_are_in_order_when_the_clock_ends_the_run(batches: int, microbatches: int):
    class Slow(Callback):
        def before_train_batch(self, state, logger):
            if state.timestamp.batch == batches - 1:
                time.sleep(1.01)

    trace = Trace()
    data = TensorLoader(torch.ones(16, 3), torch.zeros(16, dtype=torch.long), batch_size=4, shuffle=False)
    arguments = {"train_dataloader": data, "max_duration": "1s", "microbatch_size": 4 // microbatches}
    with make_trainer(trace, Slow(), **arguments) as trainer:
        trace.take()
        trainer.fit()
    assert trace.events == fit_events(batches, microbatches=microbatches)
    assert trainer.state.timestamp.total_wct == pytest.approx(1.01)


@pytest.mark.parametrize(("duration", "batches"), [("6ba", 6), ("8ba", 8), ("2ep", 8), ("16sp", 8), ("9ba", 9)])
def test_events_are_in_order_when_the_loader_has_no_length(duration: str, batches: int):
    trace = Trace()
    with make_trainer(trace, train_dataloader=Unsized(), max_duration=duration) as trainer:
        trace.take()
        trainer.fit()
        assert trainer.state.train_dataloader_len is None
    in_epochs = duration.endswith("ep")
    assert trace.events == fit_events(batches, finds_end=in_epochs, epoch_ends=in_epochs)


def test_the_next_fit_finds_the_end_of_an_epoch_of_a_loader_without_a_length():
    trace = Trace()
    with make_trainer(trace, train_dataloader=Unsized(), max_duration="4ba") as trainer:
        trainer.fit()
        assert "EPOCH_END" not in trace.take()
        trainer.fit(duration="1ba")
    assert trace.events[:5] == ["FIT_START", "BEFORE_DATALOADER", "EPOCH_END", "EPOCH_CHECKPOINT", "EPOCH_START"]
    assert (trainer.state.timestamp.epoch, trainer.state.timestamp.batch) == (1, 5)


def test_a_second_fit_continues_an_iterator_without_losing_a_batch():
    inputs: list[float] = []

    class Inputs(Callback):
        def batch_start(self, state, logger):
            inputs.append(round(float(state.batch[0][0, 0]), 1))

    with make_trainer(Inputs(), train_dataloader=iter([*make_data(6)]), max_duration="2ba") as trainer:
        trainer.fit()
        trainer.fit(duration="3ba")
    assert inputs == [0.0, 0.6, 1.2, 1.8, 2.4]


@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_an_iteration_takes_iteration_length_epochs(iteration: int):
    trace = Trace()
    with make_trainer(trace, max_duration="4ep", iteration_length=f"{iteration}ep") as trainer:
        trace.take()
        trainer.fit()
        now = trainer.state.timestamp
    assert trace.events == fit_events(16, finds_end=True, iteration=iteration)
    assert (now.iteration, now.epoch_in_iteration) == divmod(4, iteration)


def test_the_timestamp_counts_a_batch_from_batch_end_on():
    trace = Trace()
    with make_trainer(trace, max_duration="2ep") as trainer:
        trainer.fit()
    before = [(epoch, 4 * epoch + index, index) for epoch in range(2) for index in range(4)]
    assert trace.at("BATCH_START") == trace.at("AFTER_TRAIN_BATCH") == before
    after = [(epoch, batch + 1, index + 1) for epoch, batch, index in before]
    assert trace.at("BATCH_END") == trace.at("BATCH_CHECKPOINT") == after
    assert trace.at("EPOCH_END") == trace.at("EPOCH_CHECKPOINT") == [(1, 4, 0), (2, 8, 0)]
    assert trace.at("FIT_END") == [(2, 8, 0)]


def test_the_timestamp_counts_samples_tokens_and_seconds():
    with make_trainer(max_duration="6ba") as trainer:
        start = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - start
    now = trainer.state.timestamp
    assert (now.sample, now.token, now.sample_in_epoch, now.token_in_epoch) == (12, 36, 4, 12)
    assert 0 < now.batch_wct <= now.epoch_wct <= now.total_wct <= seconds
