"""What counts as training time, and durations in seconds."""

from __future__ import annotations

import time

import pytest
from loop_runs import make_data, make_trainer

from runner import Callback


@pytest.mark.usefixtures("steady")
def test_evaluation_and_what_lies_between_fits_is_not_training_time():
    class Slow(Callback):
        def eval_start(self, state, logger):
            time.sleep(0.3)

        def batch_start(self, state, logger):
            time.sleep(0.1)

    with make_trainer(Slow(), eval_dataloader=make_data(1), eval_interval="1ba") as trainer:
        time.sleep(0.3)
        trainer.eval()
        trainer.fit(duration="2ba")
        assert trainer.state.timestamp.total_wct == pytest.approx(0.2)
        time.sleep(0.3)
        trainer.eval()
        trainer.fit(duration="1ba")
        assert trainer.state.timestamp.total_wct == pytest.approx(0.3)


@pytest.mark.usefixtures("steady")
def test_what_callbacks_take_before_an_evaluation_is_training_time():
    class Slow(Callback):
        def batch_end(self, state, logger):
            time.sleep(0.1)

    with make_trainer(Slow(), eval_dataloader=make_data(1), eval_interval="1ba", max_duration="4ba") as trainer:
        trainer.fit()
        # The last batch's is in no batch after it.
        assert trainer.state.timestamp.total_wct == pytest.approx(0.3)


class SlowBatches(Callback):
    def batch_end(self, state, logger):
        time.sleep(0.02)


@pytest.mark.usefixtures("steady")
def test_a_wall_clock_duration_ends_training_in_time():
    with make_trainer(SlowBatches(), max_duration="0.29s") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.total_wct == pytest.approx(0.3)
        assert trainer.state.timestamp.batch == 16, "what follows BATCH_END counts with the batch after it"
        assert trainer.state.get_elapsed_duration() == "1dur"
        trainer.fit(duration="0.09s")
        assert trainer.state.timestamp.total_wct == pytest.approx(0.4)


def test_a_wall_clock_duration_is_one_of_a_real_clock():
    with make_trainer(SlowBatches(), max_duration="0.3s") as trainer:
        started = time.perf_counter()
        trainer.fit()
        assert 0.3 <= trainer.state.timestamp.total_wct <= time.perf_counter() - started < 20
        assert 1 < trainer.state.timestamp.batch <= 16
