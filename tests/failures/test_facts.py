"""Facts about a failure are data on the exception, wherever the exception goes."""

from __future__ import annotations

import json
import pickle

import pytest

from runner.failures.checks import check_whole
from runner.failures.errors import RankFailed, UnsupportedType, WrongKey, wrong_argument
from runner.failures.facts import Facts, Raiser, add_raiser, annotate, argument_of, facts_of
from runner.timing.event import Event
from runner.timing.time import Timestamp

NOW = Timestamp(epoch=1, batch=7, total_wct=0.5)
KNOWN = Facts(
    raisers=(Raiser("inner", Event.EVAL_START, NOW), Raiser("outer")),
    argument="size",
    section="callbacks.inner",
    key="callbacks.inner.size",
    target="own.Inner",
    works_without="algorithms",
)


def test_nothing_is_known_about_an_error_that_nobody_annotated():
    facts = facts_of(KeyError("x"))
    assert facts == Facts()
    assert (facts.raised_by, facts.event, facts.timestamp) == ("", None, None)


def test_facts_of_another_library_are_not_taken_for_ours():
    error = ValueError("x")
    error.facts = {"raised_by": "someone"}  # type: ignore[attr-defined]
    assert facts_of(error) == Facts()


def test_facts_are_added_and_the_innermost_hook_is_the_one_that_raised():
    error = ValueError("x")
    annotate(error, section="callbacks.inner")
    add_raiser(error, "inner", Event.EVAL_START, NOW)
    add_raiser(error, "outer", Event.BATCH_END, NOW)
    facts = facts_of(error)
    assert (facts.raised_by, facts.event, facts.timestamp) == ("inner", Event.EVAL_START, NOW)
    assert facts.section == "callbacks.inner"
    assert [one.config_key for one in facts.raisers] == ["inner", "outer"]
    assert not hasattr(error, "__notes__")
    with pytest.raises(TypeError):
        annotate(error, raised_bye="x")


def test_facts_of_an_exception_that_allows_no_attributes_are_kept_all_the_same():
    class Frozen(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    error = Frozen()
    annotate(error, section="model")
    assert facts_of(error).section == "model"


@pytest.mark.parametrize("facts", [Facts(), KNOWN], ids=["none", "all"])
def test_facts_survive_json(facts: Facts):
    assert Facts.from_data(json.loads(json.dumps(facts.to_data()))) == facts


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        wrong_argument("size", 0, "must be more"),
        WrongKey("a.size", "too small", "0"),
        RankFailed(1, "trace", KNOWN),
        UnsupportedType("a batch holds a set", "set"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_facts_survive_pickle(error: Exception):
    annotate(error, target="own.Inner")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), facts_of(again)) == (type(error), str(error), facts_of(error))
    assert getattr(again, "type_name", "set") == "set"


def test_a_failure_of_another_rank_keeps_the_facts_of_that_rank():
    error = RankFailed(1, "trace", KNOWN)
    add_raiser(error, "of this rank", Event.BATCH_END, NOW)
    assert facts_of(error) == KNOWN


@pytest.mark.parametrize(
    ("error", "argument"),
    [
        (ValueError("size=0: too small"), "size"),
        (ValueError("launch.grace=0: too small"), "launch.grace"),
        (ValueError("too small: size=0"), ""),
        (ValueError("size"), ""),
        (ValueError(""), ""),
        (KeyError("size=0"), ""),
        (wrong_argument("size", 0, "must be more"), "size"),
        (wrong_argument("size", "=", "must be more", TypeError), "size"),
    ],
    ids=str,
)
def test_the_argument_that_is_refused(error: Exception, argument: str):
    assert argument_of(error) == argument


def test_a_fact_comes_before_the_message():
    error = ValueError("size=0: too small")
    annotate(error, argument="sizes")
    assert argument_of(error) == "sizes"


def test_a_message_is_made_of_the_facts():
    assert str(wrong_argument("name", "x", "must be y")) == "name='x': must be y"
    assert str(WrongKey("a.name", "must be y", "'x'")) == "a.name='x': must be y"
    assert str(WrongKey("a.name", "no such key")) == "a.name: no such key"
    assert facts_of(WrongKey("a.name", "no such key")).key == "a.name"


def test_a_check_of_an_argument_says_which():
    with pytest.raises(ValueError, match="^size=0: must be a number of batches, at least 1$") as raised:
        check_whole("size", 0, 1, "a number of batches")
    assert facts_of(raised.value) == Facts(argument="size")
