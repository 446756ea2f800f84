"""Kinds of keys (path, address, secret...), which their parameters declare; paths need no second pair of quotes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.cli.catalogue import CONF, choices
from runner.cli.declared import chosen, kinds_at, with_quotes
from runner.files.values import Kind
from runner.records.arguments import bind
from runner.records.record import Record


def kinds(key: str, *arguments: str) -> set[Kind]:
    """Return the kinds of a key in a command."""
    return kinds_at(key, arguments, chosen(arguments, choices()))


@pytest.mark.parametrize(
    ("key", "arguments", "expected"),
    [
        ("data.path", ["data=imagefolder"], {Kind.PATH}),
        ("data.path", ["data=tar_shards"], {Kind.PATH}),  # or a list of paths
        ("data.cache_dir", ["data=tar_shards"], {Kind.PATH}),  # inherited by a dataclass
        ("data.tokenizer", ["data=text_files"], {Kind.HUB_NAME}),
        ("trainer.load_path", [], {Kind.PATH}),
        ("callbacks.checkpoint_saver.mirror", [], {Kind.ADDRESS}),
        ("callbacks.mlperf_callback.cache_clear_cmd", ["+callbacks=mlperf_callback"], {Kind.COMMAND}),
        ("hydra.run.dir", [], {Kind.PATH}),
        ("data.path", ["data=imagefolder", "data._target_=nowhere.data"], set()),
        ("callbacks.mine.path", ["+callbacks.mine._target_=runner.callbacks.ProgressLines"], {Kind.PATH}),
        ("data.batch_size", ["data=imagefolder"], set()),
        ("data.path", ["data=digits"], set()),
        ("run_name", [], set()),
    ],
)
def test_a_key_has_the_kind_that_its_parameter_declares(key: str, arguments: list[str], expected: set[Kind]):
    assert kinds(key, *arguments) == expected


SHIPPED = [choice for choice in choices() if choice.package and choice.file.is_relative_to(CONF)]


@pytest.mark.slow
def test_source_and_import_declare_the_same_kinds_for_all_choices():
    """A check of another user's run imports targets and completion reads their source, with the same results."""
    declared = 0
    for choice in SHIPPED:
        content = yaml.safe_load(choice.text)
        for part in reversed(choice.package.strip(".").split(".")):
            content = {part: content}
        try:
            arguments = [*bind(content)]
        except ValueError as error:  # a package that is not installed
            assert "not installed" in str(error)
            continue
        for argument in arguments:
            from_source = kinds_at(argument.path, [], [choice])
            assert from_source == (argument.kinds or set()), argument.path
            declared += bool(from_source)
    assert declared > 25


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("~/data", "'/home/me/data'"),  # as a shell expands a separate word
        ("/data/lr=3 (new)", "'/data/lr=3 (new)'"),
        ("/data/größe", "'/data/größe'"),
        ("s3://bucket/x?a=1&b=2#c", "'s3://bucket/x?a=1&b=2#c'"),
        ("/data/plain-1.5/x", "/data/plain-1.5/x"),  # Hydra can read it
        ("a b", "a b"),
        ("'/data/a(1)'", "'/data/a(1)'"),
        ("[/data/a,/data/b]", "[/data/a,/data/b]"),
        ("${oc.env:HOME}/(x)", "${oc.env:HOME}/(x)"),
        ("~/a,/b(1)", "'/home/me/a','/b(1)'"),  # a sweep over two paths
        ("", ""),
    ],
)
def test_a_path_is_quoted_if_hydra_could_not_read_it(value: str, quoted: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    typed = ["data=imagefolder", f"data.path={value}", "run_name=a(b)", "-m"]
    assert with_quotes(typed) == ["data=imagefolder", f"data.path={quoted}", *typed[2:]]


def test_without_a_sweep_a_comma_separates_list_items():
    typed = ["data=imagefolder", "data.path=~/a,~/b"]
    assert with_quotes(typed) == typed


def test_an_address_keeps_its_tilde():
    typed = ["callbacks.checkpoint_saver.mirror=~x#y"]
    assert with_quotes(typed) == ["callbacks.checkpoint_saver.mirror='~x#y'"]


def test_a_path_with_characters_of_hydra_grammar_needs_no_quotes(tmp_path: Path, run_here: Any):
    folder = tmp_path / "lr=3 (größe)"
    folder.mkdir()
    (folder / "a.txt").write_text("to be or not to be, " * 200)
    small = ("data.context=8", "data.batch_size=2", "data.eval_batch_size=8", "data.eval_tokens=64", "data.cache=null")
    model = ("model=gpt", "model.module.d_model=16", "model.module.context=8", "algorithms=none")
    overrides = ("data=text_files", f"data.path={folder}", *small, *model)
    run_here(*overrides, "trainer.max_duration=2ba", "callbacks=checkpoint_saver", "hydra.run.dir=run=(1)", code=0)
    assert Record(tmp_path / "run=(1)").config["data"]["path"] == str(folder)
    assert "INFO: data.path" not in run_here("resume", "./run=(1)", "trainer.max_duration=3ba", code=0).err


SENDS = """
from runner import Callback
from runner.files.values import Secret


class Sends(Callback):
    def __init__(self, token: Secret, fails: bool = False) -> None:
        self.token, self.fails = token, fails

    def batch_end(self, state, logger):
        logger.log_hyperparameters({"used": self.token})
        if self.fails:
            raise RuntimeError(f"refused: {self.token}")
        assert len(self.token) == 12
"""


def test_a_declared_secret_is_used_but_never_written(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(SENDS)
    callbacks = ("+callbacks=mlflow_logger", "+callbacks.s._target_=own.Sends", "+callbacks.s.token=s3cret (one)")
    short = ("model=mlp", "algorithms=none", "trainer.max_duration=2ba", "callbacks=[checkpoint_saver,crash_bundle]")
    commands = [run_here(*short, *callbacks, "hydra.run.dir=run", code=0)]
    assert "token: '***'" in (tmp_path / "run" / "config.yaml").read_text()
    longer = ("resume", "run", "trainer.max_duration=4ba")
    commands.append(run_here(*longer, code=2))
    assert "callbacks.s.token='***'" in commands[-1].err and "type the full value again" in commands[-1].err
    commands.append(run_here(*longer, "callbacks.s.token=s3cret (one)", code=0))
    assert "token" not in commands[-1].err  # the same value is not a change
    commands.append(run_here(*short, *callbacks, "+callbacks.s.fails=true", "hydra.run.dir=bad", code=1))
    assert "refused: ***" in commands[-1].err
    assert not [command for command in commands if "s3cret" in command.out + command.err]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in files if b"s3cret" in path.read_bytes()] == []
