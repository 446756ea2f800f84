"""Hooks that cannot be called, or would do nothing, are refused when the trainer is made; all others are called."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import make_trainer

from runner import Algorithm, Callback, LoggerDestination


def takes(*names: str) -> Any:
    """A function with these arguments."""
    return eval(f"lambda {', '.join(names)}: None")


WRONG_HOOKS = {
    "no logger": ("batch_end", takes("self", "state"), "state, logger"),
    "nothing": ("epoch_end", takes("self"), "state, logger"),
    "no self": ("fit_start", takes("state", "logger"), "state, logger"),
    "one more": ("eval_end", takes("self", "state", "logger", "metrics"), "state, logger"),
    "earliest name": ("training_end", takes("self", "state"), "state, logger"),
    "keyword": ("batch_start", takes("self", "state", "*", "logger"), "state, logger"),
    "a number": ("epoch_start", 3.0, "state, logger"),
    "close": ("close", takes("self"), "state, logger"),
    "post_close": ("post_close", takes("self", "state"), ""),
    "run_event": ("run_event", takes("self", "event"), "event, state, logger"),
    "state_dict": ("state_dict", takes("self", "state"), ""),
    "load_state_dict": ("load_state_dict", takes("self"), "state"),
}


@pytest.mark.parametrize("name", WRONG_HOOKS)
@pytest.mark.parametrize("kind", ["algorithms", "callbacks", "loggers"])
def test_a_method_that_cannot_be_called_is_refused_when_the_trainer_is_made(kind: str, name: str):
    hook, method, given = WRONG_HOOKS[name]
    base = {"algorithms": Algorithm, "callbacks": Callback, "loggers": LoggerDestination}[kind]
    mine = type("Mine", (base,), {hook: method})
    hook = {"training_end": "fit_end"}.get(hook, hook)
    with pytest.raises(TypeError) as raised:
        make_trainer(**{kind: [mine()]})
    define = f"{hook}(self, {given})" if given else f"{hook}(self)"
    assert str(raised.value) == (
        f"Mine.{hook} cannot be called as {hook}({given}): define {define}, or give what is no hook another name"
    )


def test_a_hook_that_would_do_nothing_is_refused():
    class Yields(Callback):
        def batch_end(self, state, logger):
            yield

    class Waits(Callback):
        async def batch_end(self, state, logger): ...

    for wrong in (Yields, Waits):
        with pytest.raises(TypeError, match=rf"{wrong.__name__}.batch_end would do nothing when called"):
            make_trainer(callbacks=[wrong()])


def test_so_are_an_attribute_in_the_place_of_a_hook_and_what_a_destination_takes():
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


def test_whatever_can_be_called_is_called():
    heard = []

    def passes_on(method):
        @functools.wraps(method)
        def batch_end(self, state, logger):
            method(self, state)

        return batch_end

    class Mine(Callback):
        def __init__(self):  # without super().__init__()
            self.fit_end = lambda *arguments: heard.append("fit_end")  # type: ignore[method-assign]
            self.batch_start = slice  # type: ignore[assignment]  # built in C, without a signature

        @torch.no_grad()
        def fit_start(self, state, logger):
            heard.append("fit_start")

        @passes_on
        def batch_end(self, state):
            heard.append("batch_end")

        @staticmethod
        def epoch_start(state, logger):
            heard.append("epoch_start")

        def epoch_end(self, _, logger=None, *others, verbose=False):
            heard.append("epoch_end")

    class Own(Algorithm):
        def __init__(self):  # without super().__init__()
            self.count = 0

        def close(self, *arguments):
            heard.append("close")

    with make_trainer([Own()], [Mine()], max_duration="3ba") as trainer:
        trainer.fit()
        assert trainer.state.algorithms[0].state_dict() == trainer.state.callbacks[1].state_dict() == {}
    assert heard == ["fit_start", "epoch_start", *["batch_end"] * 3, "epoch_end", "fit_end", "close"]


def test_on_the_command_line_it_is_one_message(run_here: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "from runner import Callback\n\n\nclass Mine(Callback):\n    def close(self, state): ...\n"
    )
    ended = run_here("model=mlp", "~callbacks.mlflow_logger", "+callbacks.mine._target_=own.Mine", code=2)
    assert ended.err == (
        "error: Mine.close cannot be called as close(state, logger): "
        "define close(self, state, logger), or give what is no hook another name\n"
    )
