"""Schedules, compared with their formulas, which are written again here, and with torch's schedulers."""

from __future__ import annotations

import inspect
import math
import pickle
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from runner.optim import schedulers
from runner.optim.scheduled_rates import ScheduledRates
from runner.optim.schedulers import (
    Schedule,
    constant,
    cosine_annealing,
    cosine_annealing_warm_restarts,
    exponential,
    linear,
    multi_step,
    polynomial,
    step,
    warmup_stable_decay,
)
from runner.timing.time import Progress, Time, Timestamp

EPOCHS, BATCHES, SAMPLES, TOKENS = 4, 10, 8, 32
TOTAL = EPOCHS * BATCHES


def positions(epochs: int = EPOCHS) -> Iterator[Timestamp]:
    """Yield the time before each batch, and the time after the last epoch."""
    now = Timestamp()
    for _ in range(epochs):
        for _ in range(BATCHES):
            yield now
            now = now.to_next_batch(SAMPLES, TOKENS, 0.5)
        now = now.to_next_epoch()
    yield now


def values(schedule: Schedule, max_duration: str = f"{EPOCHS}ep", epochs: int = EPOCHS) -> list[float]:
    """Return the multiplier of each batch, and the one after the last epoch."""
    return [schedule(Progress(now, Time.parse(max_duration), BATCHES)) for now in positions(epochs)]


# In each unit: a length of n batches, and max_duration.
UNITS: dict[str, tuple[Callable[[int], str], str]] = {
    "ba": (lambda n: f"{n}ba", f"{TOTAL}ba"),
    "sp": (lambda n: f"{n * SAMPLES}sp", f"{TOTAL * SAMPLES}sp"),
    "tok": (lambda n: f"{n * TOKENS}tok", f"{TOTAL * TOKENS}tok"),
    "sec": (lambda n: f"{n / 2}sec", f"{TOTAL / 2}sec"),
    "dur": (lambda n: f"{n / TOTAL}dur", f"{EPOCHS}ep"),
    "dur of ba": (lambda n: f"{n / TOTAL}dur", f"{TOTAL}ba"),
    "dur of sp": (lambda n: f"{n / TOTAL}dur", f"{TOTAL * SAMPLES}sp"),
    "ba of ep": (lambda n: f"{n}ba", f"{EPOCHS}ep"),
    "ep": (lambda n: f"{n // BATCHES}ep", f"{EPOCHS}ep"),
}


def fraction(n: int, warmup: int, end: int = TOTAL) -> float:
    """Return how much of the time from the end of warm-up to `end` has passed at batch n."""
    return min(1.0, (n - warmup) / (end - warmup))


def restarts(n: int, t_0: int, t_mult: int) -> float:
    """Return how much of the current period has passed at batch n."""
    while n >= t_0:
        n, t_0 = n - t_0, t_0 * t_mult
    return n / t_0


def half_cosine(x: float, alpha_f: float) -> float:
    return alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * x)) / 2


Case = tuple[Callable[[Callable[[int], str], str], Schedule], Callable[[int, int], float]]

# How to make the schedule from a function of lengths and the length of warm-up; and the multiplier at batch n after w
# batches of warm-up.
CASES: dict[str, Case] = {
    "constant": (lambda t, w: constant(0.5, t_warmup=w), lambda n, w: 0.5),
    "step": (lambda t, w: step(t(10), 0.5, t_warmup=w), lambda n, w: 0.5 ** (n // 10)),
    "multi_step": (
        lambda t, w: multi_step([t(30), t(20)], 0.3, t_warmup=w),
        lambda n, w: 0.3 ** ((n >= 20) + (n >= 30)),
    ),
    "linear": (
        lambda t, w: linear(0.8, 0.2, t_max=t(40), t_warmup=w),
        lambda n, w: 0.8 - 0.6 * fraction(n, w),
    ),
    "linear to 20": (lambda t, w: linear(t_max=t(20), t_warmup=w), lambda n, w: 1 - fraction(n, w, 20)),
    "exponential": (
        lambda t, w: exponential(0.7, decay_period=t(10), t_warmup=w),
        lambda n, w: 0.7 ** ((n - w) / 10),
    ),
    "cosine_annealing": (
        lambda t, w: cosine_annealing(0.1, t_max=t(30), t_warmup=w),
        lambda n, w: half_cosine(fraction(n, w, 30), 0.1),
    ),
    "warm_restarts": (
        lambda t, w: cosine_annealing_warm_restarts(t(10), t_warmup=w),
        lambda n, w: half_cosine(restarts(n - w, 10, 1), 0.0),
    ),
    "warm_restarts with growing periods": (
        lambda t, w: cosine_annealing_warm_restarts(t(10), t_mult=2, alpha_f=0.2, t_warmup=w),
        lambda n, w: half_cosine(restarts(n - w, 10, 2), 0.2),
    ),
    "polynomial": (
        lambda t, w: polynomial(3, 0.1, t_max=t(40), t_warmup=w),
        lambda n, w: 0.1 + 0.9 * (1 - fraction(n, w)) ** 3,
    ),
    "warmup_stable_decay": (
        lambda t, w: warmup_stable_decay(t(10), 0.1, t_max=t(30), t_warmup=w),
        lambda n, w: 1.0 if n <= 20 else 1 - 0.9 * min(1.0, (n - 20) / 10),
    ),
}
FIRST = {"constant": 0.5, "linear": 0.8}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("name", CASES)
def test_schedules_equal_their_formulas_at_every_batch_in_every_unit(name: str, warmup: int, unit: str) -> None:
    (make, formula), (length, max_duration) = CASES[name], UNITS[unit]
    expected = [FIRST.get(name, 1.0) * n / warmup if n < warmup else formula(n, warmup) for n in range(TOTAL + 1)]
    schedule = make(length, length(warmup))
    assert values(schedule, max_duration) == pytest.approx(expected, abs=1e-12)


def test_warmup_and_length_may_have_different_units() -> None:
    expected = [n / 4 if n < 4 else 1 - (n - 4) / 36 for n in range(TOTAL + 1)]
    assert values(linear(t_warmup="4ba")) == pytest.approx(expected)
    assert values(linear(t_warmup="0.1dur")) == pytest.approx(expected)
    assert values(linear(t_warmup="4ba", t_max="4ep"), "9ep") == pytest.approx(expected)


def test_schedules_keep_the_final_value_after_t_max() -> None:
    for schedule, final in (
        (linear(alpha_f=0.3, t_max="1ep"), 0.3),
        (cosine_annealing(0.3, t_max="1ep"), 0.3),
        (polynomial(2, 0.3, t_max="1ep"), 0.3),
        (warmup_stable_decay("5ba", 0.3, t_max="1ep"), 0.3),
        (cosine_annealing(t_max="1ep"), 0.0),
    ):
        assert values(schedule)[BATCHES:] == pytest.approx([final] * (TOTAL + 1 - BATCHES), abs=1e-15)
    assert values(cosine_annealing(0.3, t_warmup="1ep", t_max="1ep"))[BATCHES] == 0.3


def test_schedules_change_between_epochs_only_if_their_length_is_unknown() -> None:
    multipliers = [linear()(Progress(now, Time(4, "ep"))) for now in positions()]
    assert multipliers == [1 - (n // BATCHES) / 4 for n in range(TOTAL + 1)]


def test_steps_fall_on_exact_batches() -> None:
    # Fractions like 0.7 are not exact as floats. A rounding error would make a step a batch late.
    ten = [multi_step(["0.7dur"], 0.5)(Progress(Timestamp(epoch=n), Time(10, "ep"))) for n in range(11)]
    assert ten == [1.0] * 7 + [0.5] * 4
    sixteen = [step("0.1dur", 0.5)(Progress(Timestamp(batch=n), Time(16, "ba"))) for n in range(17)]
    assert sixteen == [0.5 ** (n * 10 // 16) for n in range(17)]
    for period in range(1, 40):
        multipliers = values(step(f"{period / TOTAL}dur", 0.5))
        assert multipliers == [0.5 ** (n // period) for n in range(TOTAL + 1)]


def test_schedules_are_never_negative() -> None:
    for make, _ in CASES.values():
        assert min(values(make(lambda n: f"{n}ba", "3ba"), epochs=9)) >= 0


@pytest.mark.parametrize(
    ("ours", "theirs", "per"),
    [
        (cosine_annealing(), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, TOTAL), "ba"),
        (cosine_annealing(0.1), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, TOTAL, eta_min=0.03), "ba"),
        (linear(1, 0.25), lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, total_iters=TOTAL), "ba"),
        (linear(t_max="15ba"), lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=15), "ba"),
        (polynomial(2), lambda o: torch.optim.lr_scheduler.PolynomialLR(o, TOTAL, power=2), "ba"),
        (step("7ba", 0.3), lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.3), "ba"),
        (step("2ep", 0.3), lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.3), "ep"),
        (multi_step(["9ba", "31ba"]), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [9, 31]), "ba"),
        (multi_step(["1ep", "3ep"]), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]), "ep"),
        (exponential(0.9, "1ba"), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9), "ba"),
        (constant(0.5), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5, total_iters=10**6), "ba"),
        (
            cosine_annealing_warm_restarts("6ba", 2),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 6, 2),
            "ba",
        ),
        (
            cosine_annealing_warm_restarts("6ba"),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 6),
            "ba",
        ),
    ],
)
def test_rates_equal_those_of_torchs_schedulers(ours: Schedule, theirs: Callable[[Any], Any], per: str) -> None:
    optimizer, reference = sgd(0.3), sgd(0.3)
    rates, scheduler = ScheduledRates(optimizer, [ours]), theirs(reference)
    previous = Timestamp()
    for now in list(positions())[:-1]:
        if (per == "ba" and now.batch) or now.epoch > previous.epoch:
            reference.step()
            scheduler.step()
        rates.step(Progress(now, Time(EPOCHS, "ep"), BATCHES))
        rate = reference.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-9, abs=1e-12), now
        previous = now


def sgd(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def test_scaled_multiplies_absolute_lengths_and_warmup_only_on_request() -> None:
    def same(*schedules: Schedule) -> bool:
        """Return whether two schedules are equal at each of 7 batches in 10 epochs."""
        times = [Timestamp(epoch=n // 7, batch=n, batch_in_epoch=n % 7) for n in range(70)]
        ours, expected = ([*map(schedule.bind(Time(10, "ep"), 7), times)] for schedule in schedules)
        return ours == expected

    assert same(linear(t_max="10ep", t_warmup="4ba").scaled(0.5), linear(t_max="5ep", t_warmup="4ba"))
    assert same(linear(t_max="10ep", t_warmup="4ba").scaled(0.5, True), linear(t_max="5ep", t_warmup="2ba"))
    assert same(linear(t_warmup="0.1dur").scaled(0.5, scale_warmup=True), linear(t_warmup="0.1dur"))
    assert same(multi_step(["4ep", "0.5dur"]).scaled(0.5), multi_step(["2ep", "0.5dur"]))
    assert same(step("4ep", 0.3).scaled(2), step("8ep", 0.3))
    assert same(exponential(0.9, "4ep").scaled(0.5), exponential(0.9, "2ep"))
    assert same(cosine_annealing_warm_restarts("4ep", 2).scaled(0.5), cosine_annealing_warm_restarts("2ep", 2))
    assert same(warmup_stable_decay("4ep", t_max="8ep").scaled(0.5), warmup_stable_decay("2ep", t_max="4ep"))
    assert same(constant(0.5, t_warmup="4ba").scaled(0.5), constant(0.5, t_warmup="4ba"))
    assert same(polynomial(2.0, t_max="3ep").scaled(0.5), polynomial(2.0, t_max="3ep").scaled(0.25).scaled(2))
    assert step("4ep").scaled(0.5) == step("4ep").scaled(0.5) != step("4ep")
    with pytest.raises(ValueError, match=r"ratio=0 must be a finite number above 0"):
        step("4ep").scaled(0)


@pytest.mark.parametrize("seed", range(20))
def test_scaled_milestones_are_reached_at_the_exact_batch(seed: int) -> None:
    rng = random.Random(seed)
    batches, ratio = rng.choice([5, 6, 31]), rng.choice(["0.1", "0.5", "0.75", "1.3"])
    milestones = {"ep": rng.sample(range(1, 9), 3), "ba": rng.sample(range(1, 200), 3)}
    for unit, values in milestones.items():
        schedule = multi_step([f"{value}{unit}" for value in values], 0.1).scaled(float(ratio))
        for length in (batches, None) if unit == "ep" else (batches,):
            multiplier = schedule.bind(Time(10, "ep"), length)
            for n in range(10 * batches):
                now = Timestamp(epoch=n // batches, batch=n, batch_in_epoch=n % batches)
                at = {"ba": Fraction(n), "ep": Fraction(n, batches) if length else Fraction(n // batches)}[unit]
                passed = sum(value * Fraction(ratio) <= at for value in values)
                assert multiplier(now) == 0.1**passed, (unit, values, ratio, n, length)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant(-1), "alpha=-1"),
        (lambda: constant(math.inf), "alpha=inf"),
        (lambda: constant(t_warmup="4"), "t_warmup='4'.*'4ep'"),
        (lambda: linear(alpha_i=-0.1), "alpha_i=-0.1"),
        (lambda: linear(alpha_f=math.nan), "alpha_f=nan"),
        (lambda: linear(t_max="0ba"), "t_max='0ba'"),
        (lambda: cosine_annealing(t_max="2dur"), "t_max='2dur'"),
        (lambda: step("0ep"), "step_size='0ep'"),
        (lambda: step("1.5ep"), "step_size='1.5ep'"),
        (lambda: multi_step([]), r"milestones=\[\]"),
        (lambda: multi_step(["1ep", "0ep"]), r"milestones=\['1ep', '0ep'\]"),
        (lambda: multi_step(["1ep", "2"]), "milestones='2'"),
        (lambda: exponential(0.9, "0ep"), "decay_period='0ep'"),
        (lambda: cosine_annealing_warm_restarts("1ep", 0.5), "t_mult=0.5"),
        (lambda: polynomial(-1), "power=-1"),
        (lambda: warmup_stable_decay("0dur"), "t_decay='0dur'"),
    ],
)
def test_wrong_values_are_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: constant("1"),  # type: ignore[arg-type]
        lambda: constant(True),
        lambda: step(5),  # type: ignore[arg-type]
        lambda: multi_step([1, 2]),  # type: ignore[list-item]
        lambda: linear(t_max=None),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_wrong_types_are_refused(make: Callable[[], Schedule]) -> None:
    with pytest.raises(TypeError, match=r"\w+=.* must be|\w+=.* is not a time"):
        make()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (linear(t_warmup="41ba"), "t_warmup='41ba' is longer than t_max='1dur'"),
        (cosine_annealing(t_max="1ep", t_warmup="0.5dur"), "t_warmup='0.5dur' is longer than t_max='1ep'"),
        (
            warmup_stable_decay("0.5dur", t_warmup="0.6dur"),
            r"t_warmup='0.6dur' \+ t_decay='0.5dur' is longer than t_max='1dur'",
        ),
        (warmup_stable_decay("0.5dur", t_max="0.4dur"), "t_decay='0.5dur' is longer than t_max='0.4dur'"),
        (linear(t_warmup="100sp"), "'100sp' cannot be expressed in 'ep'"),
        (multi_step(["1ep", "100sp"]), "'100sp' cannot be expressed in 'ep'"),
    ],
)
def test_times_that_do_not_fit_the_length_of_training_are_refused(schedule: Schedule, message: str) -> None:
    max_duration = Time(EPOCHS, "ep")
    with pytest.raises(ValueError, match=message):
        schedule.bind(max_duration, BATCHES)
    with pytest.raises(ValueError, match=message):
        schedule(Progress(Timestamp(), max_duration, BATCHES))
    with pytest.raises(ValueError, match=message):
        ScheduledRates(sgd(0.1), [schedule]).step(Progress(Timestamp(), max_duration, BATCHES))


def test_times_that_exactly_fit_are_accepted() -> None:
    # Fractions like 0.6 are not exact as floats. A rounding error would make the times too long.
    assert values(warmup_stable_decay("0.4dur", t_warmup="0.6dur"))[24] == 1.0
    assert values(linear(t_warmup="0.7dur", t_max="7ep"), "10ep")[0] == 0.0


def test_equal_schedules_compare_equal_and_can_be_pickled_and_evaluated() -> None:
    for make, _ in CASES.values():
        schedule = make(lambda n: f"{n}ba", "2ba")
        assert schedule == make(lambda n: f"{n}ba", "2ba")
        assert schedule != make(lambda n: f"{n}ba", "3ba")
        assert pickle.loads(pickle.dumps(schedule)) == schedule
        assert eval(repr(schedule)) == schedule
    assert linear(t_max=Time(4, "ep")) == linear(t_max="4ep")
    assert multi_step("2ep") == multi_step(["2ep"])


CONF = Path(__file__).parents[2] / "conf" / "scheduler"
PUBLIC = {
    name: value
    for name, value in vars(schedulers).items()
    if inspect.isclass(value) and issubclass(value, Schedule) and not inspect.isabstract(value) and name.islower()
}


def test_every_schedule_has_a_config_with_all_its_arguments() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {*PUBLIC, "none", "reduce_on_plateau"}
    assert yaml.safe_load((CONF / "none.yaml").read_text()) == {}
    for name, schedule in PUBLIC.items():
        config = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        assert config.pop("_target_") == f"runner.optim.schedulers.{name}"
        assert set(config) == set(inspect.signature(schedule).parameters)
        assert all(0 <= value <= 1 for value in values(schedule(**config)))


def test_configs_instantiate_their_schedules() -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    for name, schedule in PUBLIC.items():
        assert isinstance(instantiate(OmegaConf.load(CONF / f"{name}.yaml")), schedule)
