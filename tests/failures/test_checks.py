"""Checks of arguments, and their messages."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runner.failures.checks import check_counts, check_number, check_one_of, check_whole, parse_interval


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words"),
    [
        ("[0, 1]", (0, 0.5, 1), (-0.1, 1.1), "must be a number from 0 to 1"),
        ("[0, 1)", (0, 0.99), (-1, 1), "must be a number, at least 0 and below 1"),
        ("(0, 1]", (0.1, 1), (0, 2), "must be a number above 0 and at most 1"),
        ("(0, 1)", (0.1,), (0, 1), "must be a number above 0 and below 1"),
        ("(0, inf]", (1e-9, math.inf), (0, -1), "must be a number above 0"),
        ("[0, inf)", (0, 1e300), (-1, math.inf), "must be a finite number, at least 0"),
        ("(-inf, inf)", (-5, 0), (math.inf, -math.inf), "must be a finite number"),
    ],
)
def test_a_number_outside_its_interval_is_refused_with_the_interval_in_words(
    interval: str, inside: Any, outside: Any, words: str
):
    for value in inside:
        check_number("rate", value, interval)
    for value in (*outside, math.nan, True, "1", None):
        with pytest.raises(ValueError) as caught:
            check_number("rate", value, interval)
        assert str(caught.value) == f"rate={value!r}: {words}"


def test_none_is_allowed_if_its_meaning_is_passed():
    check_number("rate", None, "[0, 1]", none="no limit")
    check_whole("size", None, 1, none="all")
    with pytest.raises(ValueError, match=r"size=0: must be a whole number, at least 1, or None for all$"):
        check_whole("size", 0, 1, none="all")


@pytest.mark.parametrize("value", [0, 4, 2.0, True, None])
def test_a_whole_number_outside_its_range_is_refused(value: Any):
    with pytest.raises(ValueError, match=f"^size={value}: must be a whole number from 1 to 3$"):
        check_whole("size", value, 1, most=3)


def test_the_error_names_the_first_wrong_count():
    with pytest.raises(ValueError, match="^width=0: must be a whole number, at least 1$"):
        check_counts(height=1, width=0, depth=-1)


def test_none_can_be_among_the_allowed_names():
    check_one_of("mode", None, (None, "min", "max"))
    with pytest.raises(ValueError, match="mode='mim': must be one of None, 'min', 'max'; did you mean 'min'"):
        check_one_of("mode", "mim", (None, "min", "max"))


def test_an_interval_of_zero_is_refused():
    assert parse_interval("every", "2ep", "1ep").time.value == 2
    with pytest.raises(ValueError, match="every=0: must be a time above 0, such as '1ep'"):
        parse_interval("every", 0, "1ep")
