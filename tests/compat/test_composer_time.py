"""Composer's arithmetic of time, as its documentation has it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from runner import Interval
from runner import Time as OwnTime
from runner import Timestamp as OwnTimestamp
from runner.compat.composer import Time, Timestamp, TimeUnit, ensure_time


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Time(5, "ep"), "5ep"),
        (Time(3e4, TimeUnit.TOKEN), "30000tok"),
        (Time.from_timestring("3e4tok"), "30000tok"),
        (Time.from_timestring("-2ba"), "-2ba"),
        (Time.from_timestring("1h30m"), "5400sec"),
        (Time.from_timestring("0.25dur"), "0.25dur"),
        (Time.from_iteration(1), "1iter"),
        (Time.from_epoch(2), "2ep"),
        (Time.from_batch(3), "3ba"),
        (Time.from_sample(4), "4sp"),
        (Time.from_token(5), "5tok"),
        (Time.from_duration(0.5), "0.5dur"),
        (Time.from_second(6), "6sec"),
        (Time.from_timedelta(timedelta(minutes=2)), "120sec"),
        (Time.from_timedelta("2m"), "120sec"),
        (Time.from_input("7ba"), "7ba"),
        (Time.from_input(7, TimeUnit.BATCH), "7ba"),
        (Time.from_input(OwnTime(7, "ba")), "7ba"),
        (ensure_time(8, "ep"), "8ep"),
        (Time.from_epoch(1) + Time.from_epoch(2), "3ep"),
        (Time.from_epoch(1) + 2, "3ep"),
        (2 + Time.from_epoch(1), "3ep"),
        (sum([Time.from_batch(1), Time.from_batch(2)]), "3ba"),
        (Time.from_batch(5) - "2ba", "3ba"),
        (7 - Time.from_batch(5), "2ba"),
        (Time.from_batch(7) % Time.from_batch(4), "3ba"),
        (Time.from_batch(7) % 4, "3ba"),
        (Time.from_batch(7) // 2, "3ba"),
        (Time.from_epoch(4) * 0.5, "2ep"),
        (Time.from_epoch(4) * "0.5dur", "2ep"),
        (Time.from_duration(0.5) * Time.from_epoch(4), "2ep"),
        (3 * Time.from_epoch(4), "12ep"),
        (Time.from_epoch(4) / 2, "2ep"),
        (Time.from_epoch(2) / Time.from_epoch(4), "0.5dur"),
        (-Time.from_batch(3), "-3ba"),
        (+Time.from_batch(3), "3ba"),
    ],
)
def test_times_are_made_and_combined(made: Time, text: str):
    assert isinstance(made, Time) and made.to_timestring() == str(made) == text
    assert type(made.value) is (float if made.unit in ("dur", "sec") else int)


def test_times_are_compared_also_with_numbers_text_and_ours():
    three = Time.from_batch(3)
    assert three == 3 == three and three == "3ba" == three and three == OwnTime(3, "ba") == three
    assert 2 < three < 4 and "2ba" < three <= "3ba" and three >= OwnTime(3, "ba") and three != 4
    assert three != 3.5 and three != Time.from_epoch(3) and {three: 1}[Time.from_batch(3)] == 1
    assert (int(three), float(three), f"{three}", bool(Time.from_batch(0))) == (3, 3.0, "3ba", True)
    assert Interval(Time.from_batch(2)).is_due(OwnTimestamp(batch=1), OwnTimestamp(batch=2))
    annotation: Any = Time[int]
    assert annotation.__origin__ is Time


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Time.from_batch(1) + Time.from_epoch(1), "'1ba' and '1ep' are in different units"),
        (lambda: Time.from_batch(1) < "1ep", "different units"),
        (lambda: Time.from_batch(1) * Time.from_batch(2), "one of them must be a number, or in 'dur'"),
        (lambda: Time.from_timestring("10 batches"), "is not a time"),
        (lambda: Time.from_input(3), "a number needs a unit; give default_int_unit, or write '3ba' or '3ep'"),
        (lambda: Time(1, "minutes"), "'minutes' is not a valid TimeUnit"),
        (lambda: Time.from_timestring("1.5ep"), "time='1.5ep': must be a whole number of ep; '0.5dur' is half"),
        (lambda: Time.from_timestring("1e400ba"), "time='infba': must be a whole number of ba"),
        (lambda: Time.from_timestring("1.2.3ep"), "time='1.2.3ep' is not a time"),
        (lambda: Time(0.5, "ba"), "time='0.5ba': must be a whole number"),
        (lambda: Time.from_epoch(float("nan")), "time='nanep': must be a whole number"),
        (lambda: ensure_time(2.5, "ep"), "time='2.5ep': must be a whole number"),
        (lambda: Time.from_batch(3) < 2.5, "time='2.5ba': must be a whole number"),
    ],
)
def test_wrong_times_are_refused(wrong: Any, message: str):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_a_timestamp_counts_in_times():
    now = Timestamp(1, 2, 3, 4, 5, 6, 7, 8, 9, 60.0, 30.0, 1.5)
    counts = "iteration epoch batch sample token epoch_in_iteration batch_in_epoch sample_in_epoch token_in_epoch"
    assert [getattr(now, name).value for name in counts.split()] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (now.total_wct, now.epoch_wct, now.batch_wct.total_seconds()) == (timedelta(0, 60), timedelta(0, 30), 1.5)
    assert now.get("ba") == now.batch == Time(3, "ba") and now.get(TimeUnit.SECOND) == "60sec"
    assert now >= "3ba" and now < Time.from_epoch(3) and now == Time.from_sample(4)
    assert Timestamp.from_state_dict(now.state_dict()) == now


def test_a_timestamp_steps_as_ours_does():
    now, ours = Timestamp(), OwnTimestamp()
    for _ in range(2):
        now = now.to_next_batch(samples=Time.from_sample(4), tokens=5, duration=timedelta(seconds=2))
        ours = ours.to_next_batch(4, 5, 2.0)
    assert tuple(now) == tuple(ours)
    assert tuple(now.to_next_epoch()) == tuple(ours.to_next_epoch())
    assert tuple(now.to_next_epoch().to_next_iteration()) == tuple(ours.to_next_epoch().to_next_iteration())
    assert isinstance(now.to_next_epoch(), Timestamp) and now.to_next_epoch().epoch == 1
