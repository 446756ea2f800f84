"""Times, timestamps and intervals, against tables and against a counter in exact fractions."""

from __future__ import annotations

import math
import operator
import pickle
import random
import re
import subprocess
import sys
import timeit
from fractions import Fraction

import pytest

from runner.timing.time import Interval, Progress, Time, Timestamp, TimeUnit, convert

COUNTED = ("iter", "ep", "ba", "sp", "tok")

READABLE = {
    **{f"{n}{unit}": (n, unit) for n in (0, 1, 10, 123456789) for unit in COUNTED},
    "007ba": (7, "ba"),
    "0dur": (0.0, "dur"),
    "0.5dur": (0.5, "dur"),
    "1dur": (1.0, "dur"),
    "1.0dur": (1.0, "dur"),
    "90sec": (90.0, "sec"),
    "0.25sec": (0.25, "sec"),
    "90s": (90.0, "sec"),
    "90m": (5400.0, "sec"),
    "24h": (86400.0, "sec"),
    "1h30m": (5400.0, "sec"),
    "1h30m10s": (5410.0, "sec"),
    "2h5s": (7205.0, "sec"),
    "1.5h": (5400.0, "sec"),
}

# Texts that are refused, and the corrections that the message proposes.
UNREADABLE = {
    "": None,
    "5": "'5ep'",
    "0.5": "'0.5dur'",
    "1.5ep": "'1ep' or '2ep'",
    "10 ba": "'10ba'",
    "10ba\n": "'10ba'",
    "10BA": "'10ba'",
    "-1ep": "'1ep'",
    "+1ep": None,
    "1.5dur": "'1dur'",
    ".5dur": "'0.5dur'",
    "1e-3dur": "'0.001dur'",
    "50%": "'0.5dur'",
    "3epochs": "'3ep'",
    "10steps": "'10ba'",
    "5 seconds": "'5sec'",
    "30m1h": None,
    "1h1h": None,
    "ep": None,
    "ep10": None,
    "0x10ba": None,
    "\u0663ep": None,
    "1e999999999ba": None,
    "nan": None,
    "infsec": None,
    "ten epochs": None,
}


@pytest.mark.parametrize(("text", "expected"), READABLE.items())
def test_a_text_is_parsed_into_value_and_unit(text: str, expected: tuple[float, str]) -> None:
    time = Time.parse(text)
    assert (time.value, time.unit) == expected
    assert type(time.value) is type(expected[0])
    assert Time.parse(time) is time


@pytest.mark.parametrize(("text", "proposal"), UNREADABLE.items())
def test_the_error_for_an_unreadable_text_proposes_corrections(text: str, proposal: str | None) -> None:
    with pytest.raises(ValueError) as caught:
        Time.parse(text, "max_duration")
    message = str(caught.value)
    assert message.startswith(f"max_duration={text!r} ")
    assert all(allowed in message for allowed in ("'10ep'", "'100ba'", "'0.5dur'", "'1h30m'"))
    assert message.partition("Did you mean ")[2].removesuffix("?") == (proposal or "")
    for correction in re.findall(r"'([^']+)'", proposal or ""):
        Time.parse(correction)


@pytest.mark.parametrize("value", [5, 1.5, None, True, b"5ep", ["5ep"]])
def test_values_of_other_types_raise_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="max_duration="):
        Time.parse(value, "max_duration")  # type: ignore[arg-type]


def test_parse_or_epochs_reads_ints_as_epochs() -> None:
    assert Time.parse_or_epochs(3) == Time(3, "ep")
    assert Time.parse_or_epochs("3ba") == Time(3, "ba")
    for value, error in ((-1, ValueError), (True, TypeError), (1.5, TypeError), ("3", ValueError)):
        with pytest.raises(error, match="patience="):
            Time.parse_or_epochs(value, "patience")  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "unit"), [(-1, "ep"), (-0.5, "sec"), (1.5, "dur"), (-0.1, "dur")])
def test_parse_refuses_a_time_out_of_range(value: float, unit: str) -> None:
    with pytest.raises(ValueError, match="time="):
        Time.parse(Time(value, unit))


@pytest.mark.parametrize(
    ("value", "unit", "error"),
    [
        (1.0, "ep", TypeError),
        (True, "ba", TypeError),
        ("1", "ba", TypeError),
        (None, "sec", TypeError),
        (math.inf, "sec", TypeError),
        (math.nan, "dur", TypeError),
        (1, "epochs", ValueError),
    ],
)
def test_the_constructor_checks_value_and_unit(value: float, unit: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Time(value, unit)


def test_a_time_is_restored_from_its_text_repr_and_pickle() -> None:
    rng = random.Random(0)
    times = [Time(rng.randrange(10 ** rng.randrange(1, 20)), rng.choice(COUNTED)) for _ in range(300)]
    times += [Time(rng.random() ** 9, "dur") for _ in range(300)]
    times += [Time(rng.random() * 10.0 ** rng.randrange(-9, 20), "sec") for _ in range(300)]
    for time in times:
        assert Time.parse(str(time)) == time
        assert eval(repr(time)) == time
        assert pickle.loads(pickle.dumps(time)) == time


def test_times_of_one_unit_are_added_divided_and_compared() -> None:
    assert Time(3, "ep") + "2ep" == Time(5, "ep")
    assert Time(3, "ep") - Time(5, "ep") == Time(-2, "ep")
    assert Time(3, "ep") / "2ep" == 1.5
    rng = random.Random(0)
    for _ in range(100):
        a, b = rng.randrange(5), rng.randrange(5)
        for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
            assert compare(Time(a, "ba"), Time(b, "ba")) == compare(Time(a, "ba"), f"{b}ba") == compare(a, b)
    assert Time(1, "ep") != Time(1, "ba")
    assert Time(1, "ep") != 1
    assert Time(1, "ep") != "nonsense"
    assert len({Time(1, "ep"), Time(1, TimeUnit.EPOCH), Time(1, "ba")}) == 2


@pytest.mark.parametrize("operate", [operator.add, operator.sub, operator.truediv, operator.lt, operator.ge])
def test_operands_of_different_units_are_refused(operate) -> None:
    with pytest.raises(ValueError, match="'1ep' and '1ba'"):
        operate(Time(1, "ep"), "1ba")
    with pytest.raises(ValueError, match="time='1'"):
        operate(Time(1, "ep"), "1")
    with pytest.raises(TypeError):
        operate(Time(1, "ep"), 1)


def test_a_time_is_immutable() -> None:
    time = Time(1, "ep")
    with pytest.raises((AttributeError, TypeError)):
        time.value = 2  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        time.other = 2  # type: ignore[attr-defined]


def test_scaled_counts_are_exact_and_rounded_down_to_batches() -> None:
    assert Time(100, "ba").scaled(0.29, None) == "29ba"  # 100 * 0.29 is 28.999999999999996
    assert Time(10, "ep").scaled(0.5, None) == Time(10, "ep").scaled(0.5, 7) == "5ep"
    assert Time(10, "ep").scaled(0.25, 7) == "17ba"  # 17.5 rounded down
    assert Time(3, "ep").scaled(0.1, 10) == "3ba"
    assert Time(10.0, "sec").scaled(0.25, None) == "2.5sec"
    with pytest.raises(ValueError, match=r"ratio=0\.25: '10ep' would be 2\.5 epochs of unknown length"):
        Time(10, "ep").scaled(0.25, None)
    with pytest.raises(ValueError, match=r"ratio=0\.1 leaves nothing of '4ba'"):
        Time(4, "ba").scaled(0.1, None)
    for ratio in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="ratio="):
            Time(4, "ba").scaled(ratio, None)


def test_a_timestamp_equals_a_time_by_its_count() -> None:
    now = Timestamp(epoch=2, batch=4, sample=9, total_wct=1.5)
    for equal in ("4ba", "2ep", "9sp", "1.5s", Time(4, "ba"), Time(2, "ep")):
        assert now == equal and equal == now and (now != equal) is False and now <= equal and now >= equal
    for other in ("5ba", "4ep", Time(5, "ba"), "no time", 4, None, Timestamp(batch=4), (2, 4)):
        assert now != other and other != now and (now == other) is False
    assert now == Timestamp(epoch=2, batch=4, sample=9, total_wct=1.5) == tuple(now)
    assert len({now, Timestamp(epoch=2, batch=4, sample=9, total_wct=1.5)}) == 1
    with pytest.raises(ValueError, match="fraction of max_duration"):
        assert now == "0.5dur"


def test_elapsed_tenths_of_a_run_are_the_closest_floats() -> None:
    for epochs, batches in ((3, 10), (7, 10), (9, 20), (1, 30)):
        for tenth in range(10):
            done = Fraction(tenth, 10) * epochs * batches
            if done.denominator == 1:
                now = Timestamp(epoch=int(done) // batches, batch_in_epoch=int(done) % batches)
                assert Progress(now, Time(epochs, "ep"), batches).elapsed_in("dur") == float(f"0.{tenth}")


def test_transitions_advance_the_counters_of_a_timestamp() -> None:
    start = Timestamp()
    first = start.to_next_batch(samples=64, tokens=1024, duration=0.5)
    assert first == Timestamp(0, 0, 1, 64, 1024, 0, 1, 64, 1024, 0.5, 0.5, 0.5)
    second = first.to_next_batch(samples=8, duration=0.25)
    assert second == Timestamp(0, 0, 2, 72, 1024, 0, 2, 72, 1024, 0.75, 0.75, 0.25)
    epoch = second.to_next_epoch(duration=0.25)
    assert epoch == Timestamp(0, 1, 2, 72, 1024, 1, 0, 0, 0, 1.0, 0.0, 0.25)
    assert epoch.to_next_iteration() == Timestamp(1, 1, 2, 72, 1024, 0, 0, 0, 0, 1.0, 0.0, 0.25)
    assert start == Timestamp()
    assert f"ep{epoch.epoch}-ba{epoch.batch:04d}" == "ep1-ba0002"
    assert all(type(value) is int for value in epoch[:9])


def test_a_timestamp_is_compared_with_times_of_each_unit() -> None:
    now = Timestamp(iteration=1, epoch=2, batch=30, sample=400, token=5000, total_wct=60.0)
    for unit, value in {"iter": 1, "ep": 2, "ba": 30, "sp": 400, "tok": 5000, "sec": 60.0}.items():
        assert now.count(unit) == now.count(TimeUnit(unit)) == value
        assert now.get(unit) == Time(value, unit)
        assert now >= Time(value, unit)
        assert now <= f"{value + 1:g}{unit}"
        assert not now < Time(value, unit)
        assert not now > Time(value, unit)
        assert now < Time(value + 1, unit)
        assert now > Time(value - 1, unit)
        assert Time(value + 1, unit) > now
    assert now >= "1m"
    with pytest.raises(ValueError, match="max_duration"):
        now.count("dur")
    with pytest.raises(ValueError, match="max_duration"):
        _ = now < "0.5dur"
    with pytest.raises(ValueError, match="epochs"):
        now.count("epochs")
    with pytest.raises(TypeError):
        _ = now < Timestamp()
    with pytest.raises(TypeError):
        _ = now < 5


def test_a_timestamp_is_immutable_and_restored_from_its_state() -> None:
    now = Timestamp().to_next_batch(3, 4, 0.1).to_next_epoch()
    with pytest.raises(AttributeError):
        now.batch = 7  # type: ignore[misc]
    assert {type(value) for value in now.state_dict().values()} == {int, float}
    assert Timestamp.from_state_dict(now.state_dict()) == now
    assert pickle.loads(pickle.dumps(now)) == now
    with pytest.raises(ValueError, match="state="):
        Timestamp.from_state_dict({"batch": 1})
    with pytest.raises(ValueError, match="state="):
        Timestamp.from_state_dict({**now.state_dict(), "step": 1})


def test_to_next_batch_takes_microseconds() -> None:
    now = Timestamp()
    seconds = min(timeit.repeat(lambda: now.to_next_batch(64, 1024, 0.1), number=2000, repeat=20)) / 2000
    assert seconds < 5e-6  # 0.5 us on an idle core; the rest is room for slow and shared machines


def _walk(rng: random.Random, epochs: int, batches: int):
    """Yield each transition of a run with batches of random size, as (previous, now)."""
    now = Timestamp()
    for _ in range(epochs):
        for _ in range(batches):
            previous, now = now, now.to_next_batch(rng.randrange(1, 9), rng.randrange(0, 50), rng.random())
            yield previous, now
        previous, now = now, now.to_next_epoch(rng.random() / 10)
        yield previous, now
        if now.epoch % 2 == 0:
            previous, now = now, now.to_next_iteration()
            yield previous, now


@pytest.mark.parametrize("seed", range(60))
def test_an_interval_is_due_when_an_exact_counter_reaches_a_multiple(seed: int) -> None:
    rng = random.Random(seed)
    unit = rng.choice(["iter", "ep", "ba", "sp", "tok", "sec", "dur"])
    max_duration = Time(rng.randrange(1, 30), rng.choice(["ep", "ba", "sp"]))
    if unit == "dur":
        text = rng.choice(["0.1dur", "0.25dur", "0.3dur", "1dur", "0.07dur", "0.333dur"])
        period, unit = Fraction(text.removesuffix("dur")) * max_duration.value, max_duration.unit
    else:
        period = Fraction(rng.randrange(1, 12))
        text = f"{period}{unit}"
    interval, next_due = Interval(text), period
    for previous, now in _walk(rng, epochs=6, batches=7):
        expected = False
        while next_due <= Fraction(now.count(unit)):
            expected, next_due = True, next_due + period
        assert interval.is_due(previous, now, max_duration) is expected, (text, max_duration, now)


def test_fractional_intervals_are_due_at_the_expected_steps() -> None:
    def due(interval: str, max_duration: str, step) -> list[int]:
        now, unit, counts = Timestamp(), Time.parse(max_duration).unit, []
        while now < max_duration:
            previous, now = now, step(now)
            if Interval(interval).is_due(previous, now, Time.parse(max_duration)):
                counts.append(now.count(unit))
        return counts

    assert due("0.1dur", "16ep", Timestamp.to_next_epoch) == [2, 4, 5, 7, 8, 10, 12, 13, 15, 16]
    assert due("0.25dur", "10ba", Timestamp.to_next_batch) == [3, 5, 8, 10]
    assert due("1dur", "10ba", Timestamp.to_next_batch) == [10]
    assert due("0.7dur", "10ba", Timestamp.to_next_batch) == [7]  # 0.7 * 10 is above 7 in floats


def test_epoch_intervals_are_due_at_epoch_transitions_only() -> None:
    last = Timestamp(batch=9, batch_in_epoch=9)
    end = last.to_next_batch()
    epoch = end.to_next_epoch()
    assert not Interval("1ep").is_due(last, end)
    assert Interval("1ep").is_due(end, epoch)
    assert Interval("10ba").is_due(last, end)
    assert not Interval("10ba").is_due(end, epoch)


def test_a_fractional_interval_follows_a_changed_max_duration() -> None:
    interval, previous, now = Interval("0.5dur"), Timestamp(batch=4), Timestamp(batch=5)
    assert interval.is_due(previous, now, Time(10, "ba"))
    assert not interval.is_due(previous, now, Time(12, "ba"))
    assert not interval.is_due(previous, now, Time(10, "ep"))
    assert interval.is_due(previous, now, Time(10, "ba"))
    with pytest.raises(ValueError, match="max_duration"):
        interval.is_due(previous, now)


@pytest.mark.parametrize("zero", [0, "0ba", "0ep", "0dur", "0sec", Time(0, "tok")])
def test_an_interval_of_zero_is_never_due(zero) -> None:
    walk = _walk(random.Random(0), epochs=2, batches=5)
    assert not any(Interval(zero).is_due(previous, now) for previous, now in walk)


def test_intervals_are_made_from_epochs_texts_and_times() -> None:
    assert Interval(2) == Interval("2ep") == Interval(Time(2, "ep"))
    assert Interval("2ep") != Interval("2ba")
    assert len({Interval("2ep"), Interval(2)}) == 1
    assert "Time(2, 'ep')" in repr(Interval(2))
    for value, error in (
        ("2", ValueError),
        (-1, ValueError),
        ("1.5ep", ValueError),
        (1.5, TypeError),
        (None, TypeError),
    ):
        with pytest.raises(error, match="eval_interval="):
            Interval(value, name="eval_interval")  # type: ignore[arg-type]


def test_progress_is_measured_in_each_unit() -> None:
    now = Timestamp(epoch=2, batch=23, sample=230, batch_in_epoch=3, total_wct=46.0)
    progress = Progress(now, Time(4, "ep"), 10)
    assert progress.elapsed_in("ep") == 2.3
    assert progress.elapsed_in("ba") == 23.0
    assert progress.elapsed_in("sp") == 230.0
    assert progress.elapsed_in("sec") == 46.0
    assert progress.elapsed_in("dur") == 2.3 / 4
    assert Progress(now, Time(4, "ep")).elapsed_in("ep") == 2.0
    assert Progress(now, Time(92.0, "sec")).elapsed_in(TimeUnit.DURATION) == 0.5


def test_times_are_converted_between_units_of_known_length() -> None:
    progress = Progress(Timestamp(), Time(10, "ep"), 7)
    assert progress.convert("0.7dur", "ep") == 7.0
    assert progress.convert("0.7dur", "ba") == 49.0
    assert progress.convert("35ba", "ep") == 5.0
    assert progress.convert("35ba", "dur") == 0.5
    assert progress.convert(Time(3, "ep"), "ba") == 21.0
    assert progress.convert("3sp", "sp") == 3.0
    assert convert(Time(0.1, "dur"), "ep", Time(1, "ep"), None) == Fraction(1, 10)
    # A fraction of max_duration is converted by way of max_duration, which the message names.
    named = {("3sp", "ba"): "'3sp'.*'ba'", ("3ep", "sec"): "'3ep'.*'sec'", ("1dur", "tok"): "'10ep'.*'tok'"}
    for (time, unit), pattern in named.items():
        with pytest.raises(ValueError, match=pattern):
            progress.convert(time, unit)
    with pytest.raises(ValueError, match="batches_per_epoch=None"):
        Progress(Timestamp(), Time(10, "ep")).convert("3ba", "ep")
    with pytest.raises(ValueError, match="max_duration='1dur'"):
        Progress(Timestamp(), Time(1, "dur")).convert("0.5dur", "ba")


def test_times_are_imported_without_torch_numpy_and_hydra() -> None:
    code = "import sys; import runner.timing.time; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "hydra", "omegaconf"} & {name.partition(".")[0] for name in loaded}
