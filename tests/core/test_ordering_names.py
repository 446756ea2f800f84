"""Config keys of hooks: unique, in snake case, numbered or chosen by the user."""

from __future__ import annotations

import pytest
from engine_runs import A, C, Hears, L, make_trainer

from runner.core.hooks import Hooks
from runner.core.ordering import name_hooks


def test_hooks_of_a_class_get_numbered_keys_and_keep_keys_that_are_set():
    with_key = C("2")
    with_key.config_key = "c_2"
    hooks = name_hooks([C("1"), with_key, C("3"), C("4")])
    assert [hook.config_key for hook in hooks] == ["c", "c_2", "c_3", "c_4"]


@pytest.mark.parametrize("same", ["object", "key"])
def test_the_same_object_or_key_twice_is_an_error(same: str):
    first, second = C("first"), C("second")
    if same == "key":
        first.config_key = second.config_key = "mine"
    pair: list[Hooks] = [first, first] if same == "object" else [first, second]
    with pytest.raises(ValueError, match="the same object or config_key twice"):
        name_hooks(pair)


@pytest.mark.parametrize(("argument", "kind"), [("callbacks", C), ("algorithms", A)])
def test_the_error_about_a_repeated_object_names_the_argument(argument: str, kind: type[Hears]):
    hook = kind("x")
    with pytest.raises(ValueError, match=rf"^{argument}=\["):
        make_trainer(**{argument: [hook, hook]})


@pytest.mark.parametrize("argument", ["callbacks", "algorithms", "loggers"])
def test_the_keys_of_a_mapping_become_config_keys(argument: str):
    kind = {"callbacks": C, "algorithms": A, "loggers": L}[argument]
    with make_trainer(**{argument: {"mine": kind("x"), "other": kind("y")}}) as trainer:
        hooks = [hook for hook in getattr(trainer.state, argument) if isinstance(hook, Hears)]
        assert [(hook.config_key, hook.name) for hook in hooks] == [("mine", "x"), ("other", "y")]
