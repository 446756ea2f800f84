from __future__ import annotations

import subprocess
import sys

import pytest

from runner import Event
from runner.timing.event import ALIASES

# All events, in the order in which they fire.
CONSTRUCTION = "INIT BEFORE_LOAD AFTER_LOAD"
TRAINING = """
    FIT_START ITERATION_START EPOCH_START BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH
    BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD AFTER_TRAIN_BATCH BATCH_END
    BATCH_CHECKPOINT EPOCH_END EPOCH_CHECKPOINT ITERATION_END ITERATION_CHECKPOINT FIT_END
"""
EVALUATION = """
    EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
    EVAL_AFTER_ALL EVAL_STANDALONE_START EVAL_STANDALONE_END
"""
PREDICTION = """
    PREDICT_START PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END PREDICT_END
"""


def test_events_are_declared_in_firing_order():
    assert [event.name for event in Event] == f"{CONSTRUCTION} {TRAINING} {EVALUATION} {PREDICTION}".split()


def test_an_event_resolves_by_its_name_in_either_case():
    for event in Event:
        assert event.value == event.name.lower() == str(event)
        assert Event(event.value) is Event(event.name) is Event(event) is event
        assert {event: 1}[event.value] == 1 and hash(event) == hash(event.value)  # type: ignore[index]


def test_two_old_names_resolve_to_fit_start_and_fit_end():
    assert Event.TRAINING_START is Event("training_start") is Event.FIT_START
    assert Event.TRAINING_END is Event("TRAINING_END") is Event.FIT_END
    assert {*ALIASES} == {"training_start", "training_end"}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("batch_ends", "batch_end"),
        ("EPOCHSTART", "epoch_start"),
        ("on_fit_end", "fit_end"),
        ("training_stat", "training_start"),
    ],
)
def test_the_error_for_an_unknown_name_suggests_the_nearest(name: str, nearest: str):
    with pytest.raises(ValueError, match=rf"^unknown event '{name}'; did you mean '{nearest}'\?"):
        Event(name)


@pytest.mark.parametrize("value", [3, None, "", ("fit_start",)])
def test_values_that_are_not_names_are_unknown_events_too(value):
    with pytest.raises(ValueError, match="^unknown event "):
        Event(value)


def test_only_these_events_run_algorithms_in_reverse_order():
    assert {event.name for event in Event if event.closes_bracket} == {
        "AFTER_FORWARD",
        "AFTER_LOSS",
        "AFTER_BACKWARD",
        "AFTER_TRAIN_BATCH",
        "EVAL_AFTER_FORWARD",
        "PREDICT_AFTER_FORWARD",
    }


def test_importing_runner_loads_no_torch_and_sets_no_signal_handler():
    program = (
        "import signal, sys; numbers = [n for n in signal.valid_signals()];"
        "before = [signal.getsignal(n) for n in numbers];"
        "import runner, runner.timing.event; runner.Event.INIT; runner.Callback; runner.LoggerDestination;"
        "assert 'torch' not in sys.modules and 'mlflow' not in sys.modules;"
        "runner.Trainer;"
        "assert before == [signal.getsignal(n) for n in numbers]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
