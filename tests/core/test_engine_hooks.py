"""Hooks that cannot be called, or would do nothing, are refused when the Trainer is made; all others are called."""

# Some hooks have wrong signatures on purpose.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import HEARD, A, make_trainer

from runner import Algorithm, Callback, Event, LoggerDestination
from runner.core.hooks import Hooks
from runner.libraries.foreign_hooks import HOOKS_HERE


def takes(*names: str) -> Any:
    """Return a function with these arguments."""
    return eval(f"lambda {', '.join(names)}: None")


WRONG_HOOKS = {
    "no logger": ("batch_end", takes("self", "state"), "state, logger"),
    "nothing": ("epoch_end", takes("self"), "state, logger"),
    "no self": ("fit_start", takes("state", "logger"), "state, logger"),
    "one too many": ("eval_end", takes("self", "state", "logger", "metrics"), "state, logger"),
    "earlier name": ("training_end", takes("self", "state"), "state, logger"),
    "keyword": ("batch_start", takes("self", "state", "*", "logger"), "state, logger"),
    "a number": ("epoch_start", 3.0, "state, logger"),
    "close": ("close", takes("self"), "state, logger"),
    "post_close": ("post_close", takes("self", "state"), ""),
    "run_event": ("run_event", takes("self", "event"), "event, state, logger"),
    "state_dict": ("state_dict", takes("self", "state"), ""),
    "match": ("match", takes("self", "state"), "event, state"),
    "apply": ("apply", takes("self", "images"), "event, state, logger"),
    "load_state_dict": ("load_state_dict", takes("self"), "state"),
}


@pytest.mark.parametrize("name", WRONG_HOOKS)
@pytest.mark.parametrize("kind", ["algorithms", "callbacks", "loggers"])
def test_a_hook_with_other_arguments_is_refused_when_the_trainer_is_made(kind: str, name: str):
    hook, method, arguments = WRONG_HOOKS[name]
    base = {"algorithms": Algorithm, "callbacks": Callback, "loggers": LoggerDestination}[kind]
    mine = type("Mine", (base,), {hook: method})
    hook = {"training_end": "fit_end"}.get(hook, hook)
    with pytest.raises(TypeError) as caught:
        make_trainer(**{kind: [mine()]})
    define = f"{hook}(self, {arguments})" if arguments else f"{hook}(self)"
    assert str(caught.value) == (
        f"Mine.{hook} cannot be called as {hook}({arguments}): define {define}, or rename it if it is not a hook"
    )


def test_a_hook_that_is_a_generator_or_coroutine_is_refused():
    class Generator(Callback):
        def batch_end(self, state, logger):
            yield

    class Coroutine(Callback):
        async def batch_end(self, state, logger): ...

    for kind in (Generator, Coroutine):
        with pytest.raises(TypeError, match=rf"{kind.__name__}.batch_end would do nothing when called"):
            make_trainer(callbacks=[kind()])


def test_an_attribute_in_place_of_a_hook_and_other_methods_with_wrong_arguments_are_refused():
    class Started(Callback):
        def __init__(self):
            self.epoch_start = 0.0  # type: ignore[assignment]

    class Destination(LoggerDestination):
        def log_metrics(self, metrics): ...

    class Averages(Algorithm):
        def evaluation_weights(self): ...

    with pytest.raises(TypeError, match=r"Started.epoch_start cannot be called as epoch_start\(state, logger\)"):
        make_trainer(callbacks=[Started()])
    with pytest.raises(TypeError, match=r"define log_metrics\(self, metrics, step\)"):
        make_trainer(callbacks=[Destination()])
    with pytest.raises(TypeError, match=r"define evaluation_weights\(self, state\)"):
        make_trainer([Averages()])


def hook(self, *arguments): ...


@pytest.mark.parametrize(
    ("foreign", "definition"),
    [
        ("on_train_batch_end", "batch_end(self, state, logger)"),
        ("on_step_end", "batch_end(self, state, logger)"),
        ("after_step", "batch_end(self, state, logger)"),
        ("after_train_iter", "batch_end(self, state, logger)"),
        ("on_validation_epoch_end", "eval_end(self, state, logger)"),
        ("on_save_checkpoint", "state_dict(self)"),
    ],
)
@pytest.mark.parametrize("others", [(), ("fit_end", "close")])
def test_a_hook_of_another_library_is_refused_with_the_name_of_ours(foreign: str, definition: str, others: tuple):
    mine = type("Mine", (Callback,), dict.fromkeys((foreign, *others), hook))
    with pytest.raises(TypeError) as caught:
        make_trainer(callbacks=[mine()])
    remedy = f"define {definition}, or rename it if it is not a hook"
    assert str(caught.value) == f"Mine.{foreign} would never be called: {remedy}"


def test_a_class_that_inherits_hooks_of_another_library_is_accepted():
    foreign = type("Foreign", (), dict.fromkeys(HOOKS_HERE, hook))
    both = type("Both", (Callback, foreign), {"batch_end": hook, "on_train_batch_end": hook, "after_step": hook})
    make_trainer(callbacks=[both()]).close()


def test_the_table_of_foreign_hooks_names_existing_hooks():
    for foreign, name in HOOKS_HERE.items():
        assert callable(getattr(Hooks, name)) and not hasattr(Hooks, foreign)


@pytest.mark.parametrize("kind", ["algorithms", "callbacks", "loggers"])
@pytest.mark.parametrize(
    "methods", [(), ("compute",), ("_batch_end",), ("state_dict", "load_state_dict"), ("warm_up",)]
)
def test_a_class_without_a_hook_that_would_be_called_is_refused(kind: str, methods: tuple[str, ...]):
    base = {"algorithms": Algorithm, "callbacks": Callback, "loggers": LoggerDestination}[kind]
    mine = type("Mine", (base,), dict.fromkeys(methods, hook))
    with pytest.raises(TypeError, match=r"^Mine would never be called: it has no method named after an event, such as"):
        make_trainer(**{kind: [mine()]})


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (Algorithm, "evaluation_weights"),
        (Algorithm, "wrap_accumulate"),
        (Callback, "wrap_handler"),
        (Callback, "close"),
        (Callback, "post_close"),
    ],
)
def test_a_class_with_a_single_method_that_is_called_is_accepted(base: Any, name: str):
    mine = type("Mine", (base,), {name: lambda self, *arguments: getattr(super(mine, self), name)(*arguments)})
    make_trainer(**{"algorithms" if base is Algorithm else "callbacks": [mine()]}).close()


class Matches(Algorithm):
    """Written like an algorithm for Composer: records the events that `match` gets, and acts once per batch."""

    def __init__(self, name: str):
        self.name = name

    def match(self, event, state):
        HEARD.append((self.name, event.name))
        return event in (Event.INIT, Event.AFTER_TRAIN_BATCH)

    def apply(self, event, state, logger):
        HEARD.append((self.name, f"apply {event.name}"))
        return 0

    def fit_end(self, state, logger):
        HEARD.append((self.name, "fit_end"))


def test_match_is_called_at_every_event_in_the_order_of_algorithms():
    with make_trainer([A("a"), Matches("b"), A("c")], max_duration="2ba", eval_dataloader=None) as trainer:
        trainer.fit()
    assert [event for name, event in HEARD if name == "b" and event.isupper()] == [
        event for name, event in HEARD if name == "a" and event.isupper()
    ]
    calls = [call for call in HEARD if call[1] in ("AFTER_TRAIN_BATCH", "apply AFTER_TRAIN_BATCH")]
    assert calls == [
        (name, f"{prefix}AFTER_TRAIN_BATCH") for name, prefix in [("c", ""), ("b", ""), ("b", "apply "), ("a", "")] * 2
    ]
    assert [name for name, event in HEARD if event == "apply INIT"] == ["b"]
    assert HEARD.index(("b", "fit_end")) == HEARD.index(("b", "FIT_END")) - 1


def test_an_algorithm_without_match_and_apply_listens_only_to_its_own_events():
    class Plain(Algorithm):
        def batch_end(self, state, logger): ...

    with make_trainer([Plain(), Matches("m")]) as trainer:
        plain, matches = trainer.state.algorithms
        assert [event for event in Event if plain in trainer.engine.listeners(event)] == [Event.BATCH_END]
        assert all(matches in trainer.engine.listeners(event) for event in Event)


@pytest.mark.parametrize("kind", ["algorithms", "callbacks", "loggers"])
@pytest.mark.parametrize("name", ["match", "apply"])
def test_match_without_apply_and_apply_without_match_are_refused(kind: str, name: str):
    base = {"algorithms": Algorithm, "callbacks": Callback, "loggers": LoggerDestination}[kind]
    mine = type("Mine", (base,), {name: hook, "fit_end": hook})
    with pytest.raises(TypeError, match=r"^Mine: apply\(event, state, logger\) is called when .*: define both$"):
        make_trainer(**{kind: [mine()]})


def test_run_event_can_be_an_attribute_of_the_instance():
    events = []

    class Mine(Callback):
        def __init__(self):
            self.run_event = lambda event, state, logger: events.append(event)  # type: ignore[method-assign]

    make_trainer(callbacks=[Mine()]).close()
    assert events == [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD]


def test_hooks_can_be_decorated_static_or_lambdas_and_have_other_parameters():
    calls = []

    def without_logger(method):
        @functools.wraps(method)
        def batch_end(self, state, logger):
            method(self, state)

        return batch_end

    class Mine(Callback):
        def __init__(self):  # without super().__init__()
            self.fit_end = lambda *arguments: calls.append("fit_end")  # type: ignore[method-assign]
            self.batch_start = slice  # type: ignore[assignment]  # written in C, without a signature

        @torch.no_grad()
        def fit_start(self, state, logger):
            calls.append("fit_start")

        @without_logger
        def batch_end(self, state):
            calls.append("batch_end")

        @staticmethod
        def epoch_start(state, logger):
            calls.append("epoch_start")

        def epoch_end(self, _, logger=None, *others, verbose=False):
            calls.append("epoch_end")

    class MyAlgorithm(Algorithm):
        def __init__(self):  # without super().__init__()
            self.count = 0

        def close(self, *arguments):
            calls.append("close")

    with make_trainer([MyAlgorithm()], [Mine()], max_duration="3ba") as trainer:
        trainer.fit()
        assert trainer.state.algorithms[0].state_dict() == trainer.state.callbacks[1].state_dict() == {}
    assert calls == ["fit_start", "epoch_start", *["batch_end"] * 3, "epoch_end", "fit_end", "close"]


def test_a_command_with_a_wrong_hook_ends_with_a_single_message(run_here: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "from runner import Callback\n\n\nclass Mine(Callback):\n    def close(self, state): ...\n"
    )
    finished = run_here("model=mlp", "~callbacks.mlflow_logger", "+callbacks.mine._target_=own.Mine", code=2)
    assert finished.err == (
        "error: Mine.close cannot be called as close(state, logger): "
        "define close(self, state, logger), or rename it if it is not a hook\n"
    )
