"""Training time, and durations in seconds."""

from __future__ import annotations

import time

import pytest
from loop_runs import make_data, make_trainer

from runner import Callback


@pytest.mark.usefixtures("steady")
def test_training_time_excludes_evaluations_and_the_time_between_fits():
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
def test_training_time_includes_callbacks_after_the_batch():
    class Slow(Callback):
        def batch_end(self, state, logger):
            time.sleep(0.1)

    with make_trainer(Slow(), eval_dataloader=make_data(1), eval_interval="1ba", max_duration="4ba") as trainer:
        trainer.fit()
        # The time of callbacks counts with the next batch, so that after the last batch is left out.
        assert trainer.state.timestamp.total_wct == pytest.approx(0.3)


class SlowBatches(Callback):
    def batch_end(self, state, logger):
        time.sleep(0.02)


@pytest.mark.usefixtures("steady")
def test_a_wall_clock_duration_ends_training_in_time():
    with make_trainer(SlowBatches(), max_duration="0.29s") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.total_wct == pytest.approx(0.3)
        assert trainer.state.timestamp.batch == 16, "the 0.02 s after BATCH_END count with the next batch"
        assert trainer.state.get_elapsed_duration() == "1dur"
        trainer.fit(duration="0.09s")
        assert trainer.state.timestamp.total_wct == pytest.approx(0.4)


def test_a_duration_in_seconds_is_measured_with_the_real_clock():
    with make_trainer(SlowBatches(), max_duration="0.3s") as trainer:
        start = time.perf_counter()
        trainer.fit()
        assert 0.3 <= trainer.state.timestamp.total_wct <= time.perf_counter() - start < 20
        assert 1 < trainer.state.timestamp.batch <= 16
