"""Modes typed as words."""

from __future__ import annotations

import pytest
from runner.cli.quick import own_keys
from runner.cli.subcommands import spell_out

from runner.cli.verbs import MODES


@pytest.mark.parametrize(
    ("typed", "spelled"),
    [
        (["init", "it's"], ["init='it\\'s'", "mode=init"]),
        (["init=a"], ["init=a", "mode=init"]),
        (["compare", "a", "b,c", "seed=1"], ["compare=['a','b,c']", "seed=1", "mode=compare"]),
        (["help"], ["mode=help"]),
        (["help", "model=mlp"], ["help='model=mlp'", "mode=help"]),
        (["list", "--config-dir", "x", "model"], ["list='model'", "--config-dir=x", "mode=list"]),
        (["runs", "a<1", "b=2", "runs.sort=a"], ["runs.where=a<1 b=2", "runs.sort=a", "mode=runs"]),
        (["runs.sort=a"], ["runs.sort=a", "mode=runs"]),
    ],
)
def test_words_become_keys(typed: list[str], spelled: list[str]):
    assert spell_out(typed) == spelled


@pytest.mark.parametrize("typed", [["mode=init", "init=a"], ["init=null"], ["seed=1", "init"], ["prove"], ["x"], []])
def test_all_else_stays_as_it_is(typed: list[str]):
    assert spell_out(typed) == typed


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (["mode=runs", "runs.where='a=\\'b c\\''"], {"where": "a='b c'"}),
        (["mode=runs", "runs.where=null", 'runs.format="csv"'], {"format": "csv"}),
        (["mode=runs", "--config-dir", "x"], {"--config-dir": "x"}),
    ],
)
def test_own_keys_come_without_their_quotes(typed: list[str], keys: dict[str, str]):
    assert own_keys(MODES["runs"], typed) == keys
