from __future__ import annotations

import re
from typing import Any

import pytest

from runner.cli.command_line import FLAGS, WITH_VALUE, check_options, merge_repeated


@pytest.mark.parametrize(
    ("given", "merged"),
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
        # a sweep over choices, replacing, removing and values inside a callback are none of its business
        (["-m", "+callbacks=a,b", "+callbacks=c"], ["-m", "+callbacks=a,b", "+callbacks=c"]),
        (["callbacks=a", "callbacks=b"], ["callbacks=a", "callbacks=b"]),
        (["+callbacks.mine.x=1", "+callbacks.mine.y=2"], ["+callbacks.mine.x=1", "+callbacks.mine.y=2"]),
        (["+model=a", "+model=b"], ["+model=a", "+model=b"]),
        (["+callbacks=", "+callbacks=null"], ["+callbacks=", "+callbacks=null"]),
    ],
)
def test_repeated_appends_become_one_list(given: list[str], merged: list[str]):
    assert merge_repeated(given) == merged


def test_hydra_s_options_are_known(run_here: Any):
    shown = run_here("--hydra-help", code=0).out
    theirs = re.findall(r"^(--[\w-]+)((?:,-\w+)?) :", shown, re.MULTILINE)
    assert dict(theirs) == {name: f",{short}" if short else "" for name, short in {**FLAGS, **WITH_VALUE}.items()}
    check_options(["-m", "--cfg", "job", "--config-dir=x", "--multi", "seed=-1", "~callbacks.x", "a=--b"])


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--config-path=mine", ("--config-path=mine: ", "--config-dir=<folder>")),
        ("--shell-completion", ("runner completion bash",)),
        ("hydra.launcher=joblib", ("is a group, written with a slash: hydra/launcher=joblib",)),
    ],
)
def test_other_options_are_refused(argument: str, parts: tuple[str, ...]):
    with pytest.raises(ValueError) as raised:
        check_options(["seed=1", argument])
    assert all(part in str(raised.value) for part in parts), raised.value
