from __future__ import annotations

from typing import Any

import pytest
import torch
from observers import History, StopAt, averaged, warnings_of

from runner import Callback, save_checkpoint
from runner.algorithms import LAWA


@pytest.mark.parametrize(
    ("arguments", "updates"),
    [
        ({"window": 3, "update_interval": "1ba"}, [3, 4, 5]),
        ({"window": 2, "update_interval": "2ba"}, [3, 5]),
        ({"window": 5, "update_interval": "1ep"}, [2, 5]),
        ({"window": 5, "update_interval": "1ba", "start": "0.8dur"}, [4, 5]),
    ],
)
def test_the_latest_weights_are_averaged(make_trainer, arguments: dict[str, Any], updates: list[int]):
    history = History()
    with make_trainer(LAWA(**arguments), callbacks=[history], max_duration="2ep") as trainer:
        trainer.fit()
        average = averaged(trainer)
    for name, value in average.items():
        mean = sum(history.after_batch[index][name] for index in updates) / len(updates)
        torch.testing.assert_close(value, mean)


def test_training_is_the_same_with_and_without_lawa(make_trainer):
    with make_trainer(batch_norm=True) as without, make_trainer(LAWA(2, "1ba"), batch_norm=True) as with_lawa:
        without.fit()
        with_lawa.fit()
    weights = [dict(trainer.state.unwrapped_model.state_dict()) for trainer in (with_lawa, without)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"update_interval": 0}, "update_interval=0"),
        ({"start": "soon"}, "start='soon'"),
        ({"bn_batches": 1.5}, "bn_batches=1.5"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LAWA(**arguments)


@pytest.mark.parametrize("stop_at", [2, 4])
@pytest.mark.parametrize("window", [3, 10])
def test_a_resumed_run_is_bit_identical(check_resume, window: int, stop_at: int):
    check_resume(lambda: [LAWA(window, "1ba")], stop_at, batch_norm=True)


def test_a_run_resumes_before_its_window_is_full(make_trainer, tmp_path):
    def snapshots(batches: int, **arguments: Any) -> list[Any]:
        with make_trainer(LAWA(10, "1ba"), max_duration=f"{batches}ba", **arguments) as trainer:
            trainer.fit()
            save_checkpoint(trainer.state, tmp_path / str(batches))
            return trainer.state.algorithms[0].state_dict()["snapshots"]

    first, second, whole = snapshots(2), snapshots(4, resume_path=tmp_path / "2"), snapshots(4)
    assert (len(first), len(second)) == (2, 4)
    torch.testing.assert_close(second, whole, rtol=0, atol=0)


NOTHING = (
    "lawa averages nothing, update_interval={!r}: no update falls between start={!r} and end='1dur' of "
    "max_duration={!r}; update earlier or more often"
)


@pytest.mark.parametrize(
    ("interval", "start", "duration"), [("1ep", "0dur", "2ba"), ("1ba", "5ep", "1ep"), ("2ba", "5ba", "5ba")]
)
def test_a_run_without_an_update_warns_when_it_starts(make_trainer, caplog, interval: str, start: str, duration: str):
    warnings_at_start = []

    class AtStart(Callback):
        def fit_start(self, state, logger):
            warnings_at_start.extend(warnings_of(caplog))

    algorithm = LAWA(update_interval=interval, start=start)
    with make_trainer(algorithm, callbacks=[AtStart()], max_duration=duration) as trainer:
        trainer.fit()
    assert warnings_at_start == warnings_of(caplog) == [NOTHING.format(interval, start, duration)]


def test_a_run_without_an_update_warns_at_its_end_if_units_cannot_be_converted(make_trainer, caplog):
    with make_trainer(LAWA(), max_duration="16sp") as trainer:
        trainer.fit()
    assert warnings_of(caplog) == [NOTHING.format("1ep", "0dur", "16sp")]


def test_a_continued_run_may_reach_its_first_update(make_trainer, caplog, tmp_path):
    with make_trainer(LAWA(), max_duration="3ep") as trainer:
        for _ in range(3):
            trainer.fit(duration="1ba")
        assert warnings_of(caplog) == [NOTHING.format("1ep", "0dur", "1ba")]  # warned once
        assert len(trainer.state.algorithms[0].state_dict()["snapshots"]) == 1
    caplog.clear()
    with make_trainer(LAWA(start="2ep"), max_duration="1ep") as first:
        first.fit()
        save_checkpoint(first.state, tmp_path / "checkpoint")
    assert warnings_of(caplog) == [NOTHING.format("1ep", "2ep", "1ep")]
    with make_trainer(LAWA(start="2ep"), max_duration="3ep", resume_path=tmp_path / "checkpoint") as second:
        second.fit()
        assert len(second.state.algorithms[0].state_dict()["snapshots"]) == 2
    assert len(warnings_of(caplog)) == 1


def test_a_stopped_run_does_not_warn(make_trainer, caplog):
    with make_trainer(LAWA(), callbacks=[StopAt(1)], max_duration="72sp") as trainer:
        trainer.fit()
    assert warnings_of(caplog) == []
