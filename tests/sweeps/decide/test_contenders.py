"""The settings in a command of `runner decide`."""

from __future__ import annotations

import pytest

from runner.cli.command import Command, parse
from runner.config.composing import parse_override
from runner.sweeps.decide.contenders import as_sweep, find_contenders


def contenders(*typed: str) -> list[str]:
    """Return the names of the settings that a `decide` command compares."""
    command = as_sweep(parse(["decide", *typed]))
    overrides = [argument for argument in command.overrides if not argument.startswith(("-", "hydra/"))]
    return [contender.name for contender in find_contenders(command, [*map(parse_override, overrides)])]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        (["optimizer.lr=0.1,0.2", "model=mlp"], ["optimizer.lr=0.1", "optimizer.lr=0.2"]),
        (["model=mlp", "model=resnet8", "seed_of=1"], ["model=mlp", "model=resnet8"]),
        (["optimizer=sgd optimizer.lr=0.1", "optimizer=adam"], ["optimizer=sgd optimizer.lr=0.1", "optimizer=adam"]),
        (["", "algorithms=[ema] model=mlp"], ["as it is", "algorithms=[ema] model=mlp"]),
        (["a=1,2", "b=3,4"], ["a=1 b=3", "a=1 b=4", "a=2 b=3", "a=2 b=4"]),
        (["x=1 y=2", "x=2", "+callbacks=lr_monitor", "+callbacks=nan_monitor"], ["x=1 y=2", "x=2"]),
    ],
    ids=["values", "one key twice", "in quotes", "as it is", "a grid", "added callbacks are shared"],
)
def test_settings_are_typed_as_in_a_sweep_or_in_quotes(typed: list[str], names: list[str]):
    assert contenders(*typed) == names


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["model=mlp"], "there is nothing to compare"),
        (["model=mlp", "model=mlp"], "is given twice"),
        (["model=mlp optimizer=sgd", "model=mlp optimizer=adam", "seed=3"], "seed: decide trains one seed after"),
        (["a=1", "a=2", "b=1", "b=2"], "put each setting in quotes"),
        (["x=1 y=1"], "is the only one"),
        (["x=1 seed=1", "x=2"], "seed"),
        (["nowhere", "x=1 y=1"], "must be a folder of runs, or overrides"),
    ],
)
def test_a_command_without_settings_to_compare_is_refused(typed: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        contenders(*typed)


def test_commands_of_other_verbs_are_unchanged():
    command = parse(["model=mlp", "seed=1"])
    assert as_sweep(command) is command
    assert isinstance(command, Command)
