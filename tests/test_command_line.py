from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runner.command_line import OPTIONS, check_options, merge_repeated, shadowed_packages, with_saved_overrides


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


def test_hydra_s_options_are_known():
    from hydra._internal.utils import get_args_parser

    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    assert {option for option in theirs if option.startswith("--")} == {*OPTIONS}
    check_options(["-m", "--cfg", "job", "--config-dir=x", "--multi", "seed=-1", "~callbacks.x", "a=--b"])


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--lr", ("--lr: ", "lr=...")),
        ("--max-duration=3", ("max_duration=...",)),
        ("--confg", ("Did you mean --cfg?",)),
    ],
)
def test_other_options_are_refused(argument: str, parts: tuple[str, ...]):
    with pytest.raises(ValueError) as raised:
        check_options(["seed=1", argument])
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder with what it was started with."""
    folder = tmp_path / "outputs" / "day" / "time"
    (folder / "checkpoints" / "ep1").mkdir(parents=True)
    saved = ["model=mlp", "optimizer.lr=0.5", "+callbacks=a", "~callbacks.progress_bar", "resume=older"]
    (folder / "overrides.yaml").write_text(yaml.safe_dump(saved))
    return folder


KEPT = ["model=mlp", "optimizer.lr=0.5", "+callbacks=a", "~callbacks.progress_bar"]


@pytest.mark.parametrize("inner", ["", "checkpoints", "checkpoints/ep1"])
def test_a_resumed_run_is_started_as_it_was(run_dir: Path, inner: str):
    resume = f"resume={run_dir / inner}"
    assert with_saved_overrides([resume]) == [*KEPT, resume]


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [
        ("trainer.max_duration=3ep", KEPT, ["trainer.max_duration=3ep"]),
        ("optimizer.lr=1", ["model=mlp", "+callbacks=a", "~callbacks.progress_bar"], ["optimizer.lr=1"]),
        ("model=gpt", ["optimizer.lr=0.5", "+callbacks=a", "~callbacks.progress_bar"], ["model=gpt"]),
        ("callbacks=none", ["model=mlp", "optimizer.lr=0.5", "~callbacks.progress_bar"], ["callbacks=none"]),
        ("~callbacks.progress_bar", KEPT[:3], ["~callbacks.progress_bar"]),
        ("+callbacks=b", ["model=mlp", "optimizer.lr=0.5", "+callbacks=[a,b]", "~callbacks.progress_bar"], []),
        ("+callbacks=a", ["model=mlp", "optimizer.lr=0.5", "+callbacks=[a]", "~callbacks.progress_bar"], []),
    ],
)
def test_what_is_given_again_replaces_what_was_saved(run_dir: Path, given: str, before: list[str], after: list[str]):
    resume = f"resume={run_dir}"
    assert with_saved_overrides([resume, given]) == [*before, resume, *after]


def test_without_a_record_nothing_is_added(tmp_path: Path):
    for arguments in (["seed=1"], [f"resume={tmp_path}"], ["resume=missing", "seed=1"], ["resume="], ["resume=null"]):
        assert with_saved_overrides(arguments) == arguments


def test_our_own_packages_shadow_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    shadowed_packages()
