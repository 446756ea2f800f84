"""Hydra's part of the command line: repeated appends, and the options that are passed on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runner.cli.command_line import FLAGS, WITH_VALUE, check_options, merge_repeated


@pytest.mark.parametrize(
    ("arguments", "merged"),
    [
        ([], []),
        (["+callbacks=a"], ["+callbacks=a"]),
        (["+callbacks=a", "+callbacks=b"], ["+callbacks=[a,b]"]),
        (["+callbacks=a", "seed=1", "+callbacks=[b,c]"], ["+callbacks=[a,b,c]", "seed=1"]),
        (["+callbacks=[a, b]", "+callbacks=b"], ["+callbacks=[a,b]"]),
        (["+algorithms=a", "+callbacks=b", "+algorithms=c"], ["+algorithms=[a,c]", "+callbacks=b"]),
        (["+callbacks=more/own-a", "+callbacks=b"], ["+callbacks=[more/own-a,b]"]),
        (["callbacks=none", "+callbacks=a"], ["callbacks=[a]"]),
        (["+callbacks=a", "seed=1", "callbacks=[b,c]"], ["callbacks=[b,c,a]", "seed=1"]),
        (["callbacks=a", "callbacks=b", "+callbacks=c"], ["callbacks=[b,c]"]),
        # the last of a choice and its removal counts
        (["~callbacks.a", "+callbacks=a"], ["+callbacks=a"]),
        (["~algorithms.a", "~callbacks.b", "+algorithms=[b,a]"], ["~callbacks.b", "+algorithms=[b,a]"]),
        (["~callbacks", "+callbacks=a"], ["callbacks=[a]"]),
        (["+callbacks=a", "~callbacks", "callbacks.b.x=1"], ["callbacks=none", "callbacks.b.x=1"]),
        (["+callbacks=a", "~callbacks", "+callbacks=b"], ["callbacks=[b]"]),
        (["+callbacks=a", "~callbacks.a"], ["+callbacks=a", "~callbacks.a"]),
        # unchanged: sweeps over choices, replacements, values inside a callback, other groups, and empty values
        (["-m", "+callbacks=a,b", "+callbacks=c"], ["-m", "+callbacks=a,b", "+callbacks=c"]),
        (["callbacks=a", "callbacks=b"], ["callbacks=a", "callbacks=b"]),
        (["+callbacks.mine.x=1", "+callbacks.mine.y=2"], ["+callbacks.mine.x=1", "+callbacks.mine.y=2"]),
        (["+model=a", "+model=b"], ["+model=a", "+model=b"]),
        (["+callbacks=", "+callbacks=null"], ["+callbacks=", "+callbacks=null"]),
    ],
)
def test_repeated_appends_become_one_list(arguments: list[str], merged: list[str]):
    assert merge_repeated(arguments) == merged


def test_hydra_options_are_known(run_here: Any):
    help_text = run_here("--hydra-help", code=0).out
    options = re.findall(r"^(--[\w-]+)((?:,-\w+)?) :", help_text, re.MULTILINE)
    assert dict(options) == {name: f",{short}" if short else "" for name, short in {**FLAGS, **WITH_VALUE}.items()}
    check_options(["-m", "--cfg", "job", "--config-dir=x", "--multi", "seed=-1", "~callbacks.x", "a=--b"])
    check_options(["hydra.run.dir=.", "~hydra.sweep.dir"])


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--config-path=mine", ("--config-path=mine: ", "--config-dir=<folder>")),
        ("--shell-completion", ("runner completion bash",)),
        ("--cfg", ("--cfg: needs a value: job, hydra or all",)),
        ("-c=jobs", ("-c='jobs': must be job, hydra or all",)),
        ("--config-dir=", ("--config-dir: needs a value",)),
        ("hydra.run.dir=", ("hydra.run.dir='': must be a folder; without this key, a new one is made in outputs/",)),
        ("hydra.sweep.dir=null", ("hydra.sweep.dir='null': must be a folder",)),
        ("hydra.launcher=joblib", ("is a group, written with a slash: hydra/launcher=joblib",)),
    ],
)
def test_other_options_are_refused(argument: str, parts: tuple[str, ...]):
    with pytest.raises(ValueError) as raised:
        check_options(["seed=1", argument])
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.mark.parametrize("command", ["--config-dir missing", "-cd=missing check", "list --config-dir=missing"])
def test_a_config_dir_that_does_not_exist_is_one_message(run_here: Any, tmp_path: Path, command: str):
    refused = run_here(*command.split(), code=2)
    assert refused.err == f"error: --config-dir={str(tmp_path / 'missing')!r}: no such folder\n"
    assert [*tmp_path.iterdir()] == []
