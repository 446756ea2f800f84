"""The names of classes and objects: one each, in snake case, numbered or given by the user."""

from __future__ import annotations

import pytest
from engine_runs import A, C, Hears, L, make_trainer

from runner.core.hooks import Hooks
from runner.core.ordering import name_hooks


def test_objects_of_one_class_get_numbers_and_keep_keys_they_have():
    mine = C("mine")
    mine.config_key = "c_2"
    hooks = name_hooks([C("1"), mine, C("3"), C("4")])
    assert [one.config_key for one in hooks] == ["c", "c_2", "c_3", "c_4"]


@pytest.mark.parametrize("same", ["object", "key"])
def test_the_same_object_or_key_twice_is_an_error(same: str):
    one, other = C("one"), C("other")
    if same == "key":
        one.config_key = other.config_key = "mine"
    pair: list[Hooks] = [one, one] if same == "object" else [one, other]
    with pytest.raises(ValueError, match="the same object or config_key twice"):
        name_hooks(pair)


@pytest.mark.parametrize(("argument", "kind"), [("callbacks", C), ("algorithms", A)])
def test_the_error_names_the_argument(argument: str, kind: type[Hears]):
    one = kind("one")
    with pytest.raises(ValueError, match=rf"^{argument}=\["):
        make_trainer(**{argument: [one, one]})


@pytest.mark.parametrize("argument", ["callbacks", "algorithms", "loggers"])
def test_the_keys_of_a_mapping_become_config_keys(argument: str):
    kind = {"callbacks": C, "algorithms": A, "loggers": L}[argument]
    with make_trainer(**{argument: {"mine": kind("x"), "other": kind("y")}}) as trainer:
        own = [one for one in getattr(trainer.state, argument) if isinstance(one, Hears)]
        assert [(one.config_key, one.name) for one in own] == [("mine", "x"), ("other", "y")]
