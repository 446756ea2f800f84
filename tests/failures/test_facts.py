"""Facts about a failure are stored on its exception, and survive JSON and pickle."""

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
ALL_FACTS = Facts(
    raisers=(Raiser("inner", Event.EVAL_START, NOW), Raiser("outer")),
    argument="size",
    section="callbacks.inner",
    key="callbacks.inner.size",
    target="own.Inner",
    works_without="algorithms",
)


def test_an_error_without_annotations_has_empty_facts():
    facts = facts_of(KeyError("x"))
    assert facts == Facts()
    assert (facts.raised_by, facts.event, facts.timestamp) == ("", None, None)


def test_a_facts_attribute_of_another_library_is_ignored():
    error = ValueError("x")
    error.facts = {"raised_by": "other"}  # type: ignore[attr-defined]
    assert facts_of(error) == Facts()


def test_an_error_that_passes_several_hooks_is_raised_by_the_innermost():
    error = ValueError("x")
    annotate(error, section="callbacks.inner")
    add_raiser(error, "inner", Event.EVAL_START, NOW)
    add_raiser(error, "outer", Event.BATCH_END, NOW)
    facts = facts_of(error)
    assert (facts.raised_by, facts.event, facts.timestamp) == ("inner", Event.EVAL_START, NOW)
    assert facts.section == "callbacks.inner"
    assert [raiser.config_key for raiser in facts.raisers] == ["inner", "outer"]
    assert not hasattr(error, "__notes__")
    with pytest.raises(TypeError):
        annotate(error, raised_bye="x")


def test_an_exception_that_allows_no_attributes_keeps_its_facts():
    class Frozen(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    error = Frozen()
    annotate(error, section="model")
    assert facts_of(error).section == "model"


@pytest.mark.parametrize("facts", [Facts(), ALL_FACTS], ids=["none", "all"])
def test_facts_survive_json(facts: Facts):
    assert Facts.from_data(json.loads(json.dumps(facts.to_data()))) == facts


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        wrong_argument("size", 0, "must be more"),
        WrongKey("a.size", "too small", "0"),
        RankFailed(1, "trace", ALL_FACTS),
        UnsupportedType("a batch holds a set", "set"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_facts_survive_pickle(error: Exception):
    annotate(error, target="own.Inner")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), facts_of(copy)) == (type(error), str(error), facts_of(error))
    assert getattr(copy, "type_name", "set") == "set"


def test_a_failure_of_another_rank_keeps_the_facts_of_that_rank():
    error = RankFailed(1, "trace", ALL_FACTS)
    add_raiser(error, "outer", Event.BATCH_END, NOW)
    assert facts_of(error) == ALL_FACTS


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
def test_the_refused_argument_is_a_fact_or_the_start_of_the_message(error: Exception, argument: str):
    assert argument_of(error) == argument


def test_an_argument_among_the_facts_takes_precedence_over_the_message():
    error = ValueError("size=0: too small")
    annotate(error, argument="sizes")
    assert argument_of(error) == "sizes"


def test_messages_of_wrong_arguments_and_keys_name_key_value_and_rule():
    assert str(wrong_argument("name", "x", "must be y")) == "name='x': must be y"
    assert str(WrongKey("a.name", "must be y", "'x'")) == "a.name='x': must be y"
    assert str(WrongKey("a.name", "no such key")) == "a.name: no such key"
    assert facts_of(WrongKey("a.name", "no such key")).key == "a.name"


def test_the_error_of_a_check_has_the_argument_as_a_fact():
    with pytest.raises(ValueError, match="^size=0: must be a number of batches, at least 1$") as caught:
        check_whole("size", 0, 1, "a number of batches")
    assert facts_of(caught.value) == Facts(argument="size")
