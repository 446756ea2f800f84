"""Printed commands, parsed back as a shell and Hydra parse them."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from runner.cli.command_line import typed_value
from runner.terminal.commands import override, show_command, unquoted

NAMES = [
    *("plain", "outputs/2026-11-23/09-05-20", "a=b", "a,b", "it's", 'say "x"', "a(b)", "a#b", "$HOME", "100%"),
    *("a b", " a ", "é-ü", "{a}", "[x]", "${seed}", "\\${seed}", "a\\b", "end\\", "end\\\\", "a\\'b", "'", '"'),
    *("null", "True", "1e3", "7", "~x", "-x", "x:y", "a?b", "*", "a;b", "`a`", "a\tb", "é${seed}'\\"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_printed_command_is_parsed_back_to_the_same_folder(name: str):
    *start, word, argument = shlex.split(show_command("resume", name, override("trainer.load_path", name)))
    assert start == ["python", "-m", "runner", "resume"] and word == name
    config = OmegaConf.create({"seed": 3})
    config.load_path = OverridesParser.create().parse_override(argument).value()
    assert config.load_path == name
    assert unquoted(argument.partition("=")[2]) == name
    assert typed_value([argument], "trainer.load_path") == (None if name == "null" else name)


def test_a_plain_folder_is_printed_without_quotes():
    folder = "outputs/2026-11-23/09-05-20"
    command = f"python -m runner eval {folder} trainer.load_path={folder}"
    assert show_command("eval", folder, override("trainer.load_path", folder)) == command
