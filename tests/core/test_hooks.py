"""The base class of hooks: a method for each event, and class definitions with wrong names are refused."""

from __future__ import annotations

import pytest

from runner import Algorithm, Callback, Event, LoggerDestination
from runner.core.hooks import Hooks
from runner.timing.event import ALIASES


@pytest.mark.parametrize("kind", [Callback, Algorithm, LoggerDestination])
def test_every_event_has_a_hook_that_does_nothing(kind: type[Hooks]):
    hooks = kind()
    for event in Event:
        assert getattr(hooks, event.value)("state", "logger") is None
        assert getattr(Hooks, event.value).__doc__.startswith(f"{event.name}: ")
        assert hooks.run_event(event, "state", "logger") is None  # type: ignore[arg-type]
    assert hooks.close("state", "logger") is None and hooks.post_close() is None  # type: ignore[arg-type]
    assert hooks.state_dict() == {}
    hooks.load_state_dict({"any": 1})


def test_all_public_methods_but_a_few_are_events():
    methods = {name for name, value in vars(Hooks).items() if callable(value) and not name.startswith("_")}
    states = {"state_dict", "load_state_dict", "gather_state"}
    others = {"warm_up", "run_event", "match", "apply", "close", "post_close"} | states
    assert methods - others == {event.value for event in Event}


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("batch_ends", "batch_end"),
        ("on_batch_end", "batch_end"),
        ("epoch_begin", "epoch_end"),
        ("fit_strat", "fit_start"),
        ("trainig_start", "training_start"),
        ("eval_before_al", "eval_before_all"),
        ("predict_after_foward", "predict_after_forward"),
    ],
)
@pytest.mark.parametrize("kind", [Callback, Algorithm, LoggerDestination])
def test_a_misspelled_hook_is_refused_when_its_class_is_defined(kind: type[Hooks], wrong: str, nearest: str):
    def hook(self, state, logger): ...

    with pytest.raises(
        TypeError,
        match=rf"Mine\.{wrong}\(state, logger\) would never be called: unknown event.*did you mean '{nearest}'",
    ):
        type("Mine", (kind,), {wrong: hook})


def test_a_hook_named_as_in_other_libraries_is_refused_with_any_parameters():
    def hook(self, trainer, module): ...

    message = r"Mine\.on_epoch_end\(trainer, module\) would never be called: unknown event 'on_epoch_end'"
    with pytest.raises(TypeError, match=message + "; did you mean 'epoch_end'.*give it another name"):
        type("Mine", (Callback,), {"on_epoch_end": hook})


def test_every_event_with_an_extra_letter_is_refused():
    def hook(self, state, logger): ...

    for event in Event:
        with pytest.raises(TypeError, match="did you mean"):
            type("Mine", (Callback,), {f"{event.value}s": hook})


def test_methods_that_do_not_look_like_hooks_are_accepted():
    class Mine(Callback):
        batch_ends_seen = 0

        def batch_ends(self, state): ...  # other parameters than a hook
        def _batch_ends(self, state, logger): ...  # private
        def compute_statistics(self, state, logger): ...  # similar to no event
        def close(self, state, logger): ...
        def training_start(self, state, logger): ...

    assert Mine().batch_ends("state") is None


def test_a_misspelled_hook_in_a_subclass_of_a_callback_is_refused():
    class Parent(Callback):
        def batch_end(self, state, logger): ...

    with pytest.raises(TypeError, match="batch_en"):

        class Child(Parent):
            def batch_en(self, state, logger): ...

    assert Parent().batch_end.__name__ == "batch_end"


@pytest.mark.parametrize(("alias", "name"), [*ALIASES.items()])
def test_a_hook_can_have_its_earlier_or_its_present_name_but_not_both(alias: str, name: str):
    def early(self, state, logger):
        return "early"

    def late(self, state, logger):
        return "late"

    mixin = type("Mixin", (), {alias: early})
    by_alias = type("ByAlias", (Callback,), {alias: early})
    by_name = type("ByName", (Callback,), {name: late})
    for kind, expected in [
        (by_alias, "early"),
        (by_name, "late"),
        (type("Child", (by_alias,), {}), "early"),
        (type("Renamed", (by_alias,), {name: late}), "late"),
        (type("RenamedBack", (by_name,), {alias: early}), "early"),
        (type("Mixed", (mixin, Callback), {}), "early"),
    ]:
        assert getattr(kind(), name)("state", "logger") == expected, kind
    with pytest.raises(TypeError, match=f"Mine has both {alias!r} and {name!r}"):
        type("Mine", (Callback,), {alias: early, name: late})


@pytest.mark.parametrize("name", ["runs_before", "runs_after", "conflicts_with"])
def test_a_declaration_of_order_that_is_a_string_is_refused(name: str):
    with pytest.raises(TypeError, match=f"Mine.{name}='EMA': must be a set of class names, {{'EMA'}}"):
        type("Mine", (Algorithm,), {name: "EMA"})
