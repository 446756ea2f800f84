"""Predicts from the config what a job will do when, as functions of time, before anything trains.

Schedules, intervals and what has an `effect_at` are functions of time; all else acts from the first batch on. What the
config does not decide is unknown.

A class of a user is known if it has a method `effect_at(self, state)`, which returns what its arguments and the length
of the run make it do at that moment, as plain values: equal values, equal effects. `state` has only what is known of
time: `timestamp` (epoch and batches), `previous_timestamp`, `progress`, `is_due` and `get_elapsed_duration`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from runner.arguments import split_schedulers
from runner.config import build
from runner.config.composed import OF_THE_COMMAND, targets
from runner.config.signatures import locate
from runner.evaluator import ensure_evaluators, interval_or_rule
from runner.optim.factories import make_schedulers
from runner.runs.recording import fingerprint, identify
from runner.state import State
from runner.time import Interval, Time, Timestamp, TimeUnit, convert

NEUTRAL = (*OF_THE_COMMAND, "run_name", "experiment_name", "objective", "vars", "test")
"""Keys that no batch depends on; `test` comes after training."""
OF_TIME = ("max_duration", "eval_interval", "scale_schedule_ratio", "scale_warmup")
"""Keys of the trainer that set when something happens."""
COUNTED = (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION)
OURS = ("runner.", "torch.")
LOOKS_AT_LENGTH = re.compile(r"max_duration|progress\b|elapsed|is_due|dataloader_len")
FRACTION = re.compile(r"\ddur\b")  # in a callback's arguments: a time that stretches with the run
UNCOUNTED: Any = object()  # samples, tokens and seconds are not known in advance: computing with them is a TypeError


@dataclass
class Moment:
    """A stand-in for the State that knows only time."""

    max_duration: Time
    train_dataloader_len: int
    timestamp: Timestamp = Timestamp()
    previous_timestamp: Timestamp = Timestamp()

    progress = State.progress
    is_due = State.is_due
    get_elapsed_duration = State.get_elapsed_duration


Effect = Callable[[Moment], Any]


class Foreseen:
    """A job, divided into values that must be equal and functions of time.

    Attributes:
        unknown: why nothing can be said of it; empty if something can.
        fixed: values that must be equal for jobs to train alike at all.
        effects: functions of time by name, each with what it was made from.
        rate: the multiplier of the learning rate for the next batch, likewise.
    """

    def __init__(self, number: int, config: Mapping[str, Any]) -> None:
        self.number = number
        self.config = config
        self.identity = identify(config)
        self.fixed: dict[str, Any] = {key: one for key, one in config.items() if key not in NEUTRAL}
        self.effects: dict[str, tuple[Any, Effect]] = {}
        self.rate: tuple[Any, Effect] = (None, lambda moment: None)
        self.unknown = next(self._find_unknown(), "")
        self.end: int | None = None
        if not self.unknown:
            try:
                self._foresee()
            except (TypeError, ValueError) as error:
                self.unknown = f"its length is not known in advance ({error})"

    def _find_unknown(self) -> Iterator[str]:
        """Yield the reasons why a job is unpredictable."""
        trainer = self.config["trainer"]
        if self.config["budget"] is not None:
            yield "budget: measured when a job starts"
        if isinstance(trainer["eval_interval"], Mapping):
            yield "trainer.eval_interval: a function may look at anything"
        if build.make_launch(self.config).processes() > 2 and not trainer.get("deterministic"):
            yield "launch: three ranks or more resume to the bit with trainer.deterministic=true only"
        target = self.config["model"]["_target_"]
        model = locate("model", target)
        is_seen = isinstance(model, type) and getattr(model, "training_step", None) is None
        if not is_seen and not target.startswith(OURS):
            yield f"model: {target} may have a training_step, which sees the state"
        for group in ("algorithms", "callbacks"):
            for key, section in (self.config.get(group) or {}).items():
                outer, *inner = (locate(path, one["_target_"]) for path, one in targets(section, f"{group}.{key}"))
                is_told = hasattr(outer, "effect_at")
                if not all(_is_ours(one) for one in ([*inner] if is_told else [outer, *inner])):
                    yield f"{group}.{key}: {section['_target_']} does not say what it does when (effect_at)"

    def look(
        self, varying: Sequence[str], rates_vary: bool, previous: Timestamp, now: Timestamp
    ) -> tuple[list[Any], Any]:
        """Return the named effects at a moment, and the rate after it; unknown values equal nothing."""
        moment = self.moment
        moment.timestamp = now
        moment.previous_timestamp = previous
        done = [_value(self.effects[name][1], moment) for name in varying]
        return done, _value(self.rate[1], moment) if rates_vary else None

    def _foresee(self) -> None:
        trainer = self.config["trainer"]
        self.fixed["trainer"] = {key: one for key, one in trainer.items() if key not in OF_TIME}
        length, evaluators = _data_of(self.config)
        if length is None:
            raise ValueError("the training data has no length")
        length = min(length, trainer.get("train_subset_num_batches") or length)
        ratio = trainer.get("scale_schedule_ratio", 1.0)
        whole = Time.parse_or_epochs(trainer["max_duration"]).scaled(ratio, length)
        self.end = int(convert(whole, TimeUnit.BATCH, None, length))
        self.moment = Moment(whole, length)
        self._length = str(whole)
        end = self.end
        self.effects["trainer.max_duration"] = self._length, lambda moment: moment.timestamp.batch >= end
        self._foresee_intervals("trainer.eval_interval", _intervals_of(trainer, evaluators))
        self._foresee_rates(ratio)
        for group in ("algorithms", "callbacks"):
            sections = self.config.get(group) or {}
            self.fixed[group] = {key: self._foresee_hooks(group, key, one) for key, one in sections.items()}
            self.fixed[f"order of {group}"] = [*sections]

    def _foresee_intervals(self, name: str, intervals: Sequence[Interval]) -> None:
        """Record when intervals are due. Jobs share a batch only if those that depend on the clock are the same."""
        if all(one.time.unit in COUNTED for one in intervals):
            source = [[str(one.time) for one in intervals], self._length]
            self.effects[name] = source, lambda moment: [moment.is_due(one) for one in intervals]
        else:
            self.fixed[name] = [[str(one.time) for one in intervals], self._length]

    def _foresee_rates(self, ratio: float) -> None:
        section = self.config.get("scheduler")
        made, acting = split_schedulers(build.make("scheduler", section))
        inside = [locate(path, one["_target_"]) for path, one in targets(section or {}, "scheduler")]
        if acting or not all(getattr(one, "__module__", "") == "runner.schedulers" for one in inside):
            self.fixed["scheduler"] = section, self._length
            return
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        scale_warmup = self.config["trainer"].get("scale_warmup", False)
        ((rates,), _) = make_schedulers(made, [optimizer], self.moment.progress, ratio, scale_warmup)

        def rate(moment: Moment) -> float:
            rates.step(moment.progress)
            return optimizer.param_groups[0]["lr"]

        self.fixed["scheduler"] = bool(inside)
        self.rate = [section, ratio, scale_warmup, self._length], rate

    def _foresee_hooks(self, group: str, key: str, section: Mapping[str, Any]) -> Any:
        """Record what callbacks and algorithms do when, and return values that must be equal."""
        name = f"{group}.{key}"
        target = locate(name, section["_target_"])
        if hasattr(target, "effect_at"):
            self.effects[name] = [section, self._length], build.make(name, section).effect_at
            return section["_target_"]
        if group == "algorithms":
            return [section, self._length if looks_at_length(target.__module__) else ""]
        intervals = {one: made for one in section if (made := _as_interval(one, section[one])) is not None}
        self._foresee_intervals(name, [*intervals.values()])
        rest = {one: value for one, value in section.items() if one not in intervals}
        return {**rest, "max_duration": self._length} if FRACTION.search(repr(rest)) else rest


def _value(effect: Effect, moment: Moment) -> Any:
    try:
        return effect(moment)
    except (TypeError, ValueError):
        return object()


def _is_ours(target: Any) -> bool:
    return f"{getattr(target, '__module__', '')}.".startswith(OURS)


def _as_interval(name: str, value: Any) -> Interval | None:
    """Return an argument of a callback as an interval, if its name marks it as one; otherwise None."""
    if not name.endswith("interval") or not isinstance(value, str):
        return None
    try:
        found = Interval(value)
    except ValueError:
        return None
    return found if found.time.unit in COUNTED else None


def _intervals_of(trainer: Mapping[str, Any], evaluators: Any) -> list[Interval]:
    found = ensure_evaluators(evaluators, interval_or_rule(trainer["eval_interval"]))
    intervals = [one.eval_interval for one in found if one.eval_interval is not None]
    if not all(isinstance(one, Interval) for one in intervals):
        raise ValueError("an evaluator has a function as its interval")
    return intervals  # type: ignore[return-value]


@cache
def looks_at_length(module: str) -> bool:
    """Return whether the source of a module of ours, or of one beside it that it uses, mentions the length of a run."""
    package = module.rpartition(".")[0]
    used = {getattr(one, "__module__", "") for one in vars(sys.modules[module]).values()}
    beside = {one for one in used if isinstance(one, str) and one.rpartition(".")[0] == package and one != module}
    text = inspect.getsource(sys.modules[module])
    return LOOKS_AT_LENGTH.search(text) is not None or any(map(looks_at_length, beside))


_read: dict[str, tuple[int | None, Any]] = {}  # lengths and evaluators of data that were made once


def _data_of(config: Mapping[str, Any]) -> tuple[int | None, Any]:
    """Return the batches of an epoch and the evaluation data; data with a stand-in is not read."""
    key = fingerprint([config["data"], config.get("folds")])
    if key not in _read:
        section = config["data"]
        target = section["_target_"]
        fake = {"_target_": f"{target}.fake"} if hasattr(locate("data", target), "fake") else {}
        train, evaluation = build.make_data({**config, "data": {**section, **fake}})
        try:
            _read[key] = len(train), evaluation
        except TypeError:
            _read[key] = None, evaluation
    return _read[key]


def _at(batch: int, epoch: int, in_epoch: int) -> Timestamp:
    known: dict[str, Any] = dict.fromkeys(Timestamp._fields, UNCOUNTED)
    return Timestamp(**known | {"batch": batch, "epoch": epoch, "batch_in_epoch": in_epoch})


START = _at(0, 0, 0)


def next_moment(now: Timestamp, length: int) -> Timestamp:
    """Return the next moment: the end of a batch, or after the last batch the end of an epoch."""
    if now.batch_in_epoch == length:
        return _at(now.batch, now.epoch + 1, 0)
    return _at(now.batch + 1, now.epoch, now.batch_in_epoch + 1)
