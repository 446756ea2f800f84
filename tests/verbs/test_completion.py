"""Completion: the candidates for a line, and the scripts in the shells that they are for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.cli.catalogue import CONF
from runner.cli.verbs import VERBS
from runner.verbs.completion import LINE, SHELLS, complete


def words(line: str) -> list[str]:
    return [word for word, _ in complete(line)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("runner comp", ["compare", "completion"]),
        ("runner -m --config-dir mine comp", ["compare", "completion"]),
        ("runner model=mlp comp", []),  # only the first word is a verb
        ("runner eval comp", []),
        ("runner optimizer", ["optimizer.", "optimizer/param_groups=", "optimizer="]),
        ("runner optimizer.nest", ["optimizer.nesterov="]),
        ("runner optimizer=adamw optimizer.b", ["optimizer.betas="]),
        ("runner experiment=stdlib_lm_plain optimizer.b", ["optimizer.betas="]),
        ("runner optimizer.nesterov=", ["optimizer.nesterov=false", "optimizer.nesterov=true"]),
        ("python -m runner +callbacks=[ema,speed", ["+callbacks=[ema,speed_monitor"]),
        ("runner '+callbacks=[lr_monitor,lr", []),
        ("runner +callbacks=early_stopper callbacks.early_stopper.p", ["callbacks.early_stopper.patience="]),
        ("runner ~callbacks.p", ["~callbacks.progress_bar"]),
        ("/usr/bin/runner predict RUN --format ", ["parquet", "csv", "jsonl", "pt"]),
        ("runner predict --format=", ["--format=parquet", "--format=csv", "--format=jsonl", "--format=pt"]),
        ("runner -m predict --form", ["--format"]),
        ("runner prove --ki", ["--kills"]),
        ("runner prove --kills ", []),  # any number
        ("runner prove --keep optimizer.nest", ["optimizer.nesterov="]),
        ("runner resume latest --allow-c", ["--allow-changes", "--allow-code"]),
        ("runner --af", ["--afresh"]),
        ("runner help early", ["early_stopper"]),
        ("runner help lr-", ["lr-range"]),
        ("runner list call", ["callbacks"]),
        ("runner completion ", ["bash", "fish", "zsh"]),
        ("runner runs --", ["--config-dir", "--format", "--help", "--json", "--limit", "--sort"]),
        ("runner --config-dir ", []),  # the shell offers files
        ("runner --ver", ["--version"]),
        ("runner data=imagefolder data.path=", []),  # there is no file
        ("runner optimizer.lr=", []),
        ("python train.py mod", []),
        ("runner", []),
        ("", []),
    ],
)
def test_what_a_line_may_become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, found: list[str]):
    monkeypatch.chdir(tmp_path)
    assert words(line) == sorted(found)


def test_every_verb_group_and_option_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert {*VERBS} <= {*words("runner ")}
    assert {f"{file.name}=" for file in CONF.iterdir() if file.is_dir()} <= {*words("runner ")}
    for verb in VERBS.values():
        assert {f"--{option.name}" for option in verb.options} <= {*words(f"runner {verb.name} --")}


def test_files_and_runs_of_the_user_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for file in ("conf/model/mine.yaml", "other/model/theirs.yaml", "outputs/2026-11-20/10-00-00/config.yaml"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("# A network.\nwidth: 3 # units\n")
    assert words("runner model=mine model.") == ["model.width="]
    assert words("runner --config-dir=other model=th") == ["model=theirs"]
    run = "outputs/2026-11-20/10-00-00"
    assert words("runner compare out") == words(f"runner compare {run} {run} out") == [run]
    assert words("runner resume out") == words("runner -m fork out") == words("runner eval seed=1 out") == [run]
    assert words("runner compare lat") == ["latest"]
    assert words("runner resume lat") == words("runner check --allow-changes a lat") == ["latest"]
    assert words("runner resume latest out") == words("runner fork latest out") == words("runner init out") == []


def test_the_value_of_a_path_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for file in ("data/train/a.png", "data/tiny.txt", ".hidden/x", "da ta/x"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    typed = "runner data=imagefolder data.path="
    assert words(typed) == ["data.path=data/"]  # neither hidden files, nor those that a shell has to quote
    assert words(f"{typed}.h") == ["data.path=.hidden/"]
    assert words(f"{typed}data/t") == ["data.path=data/tiny.txt", "data.path=data/train/"]
    assert words(f"{typed}{tmp_path}/dat") == [f"data.path={tmp_path}/data/"]
    assert words("runner trainer.load_path=dat") == ["trainer.load_path=data/"]
    assert words("runner optimizer.lr=d") == words(f"{typed}nowhere/") == []


def test_descriptions_hold_nothing_that_a_terminal_acts_on(tmp_path: Path, run_here: Any, monkeypatch: Any):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# A\x1b[31m\t network.\n")
    monkeypatch.setenv(LINE, "runner model=mi")
    assert run_here("completion", "candidates", code=0).out == "model=mine\tA\\x1b[31m\\t network\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the commands `runner` and `python`, and a script for each shell."""
    for name, starts in (("runner", f'"{sys.executable}" -m runner'), ("python", f'"{sys.executable}"')):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\nexec {starts} "$@"\n')
        command.chmod(0o755)
    for script in SHELLS.iterdir():
        shutil.copy(script, tmp_path)
    return tmp_path


def ask(shell: str, program: str, folder: Path) -> list[str]:
    """The lines that a program in a shell prints."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder / ".config")}
    done = subprocess.run([shell, "-c", program], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_bash_completes(folder: Path):
    program = """
    source runner.bash
    try() {
        COMP_LINE="$1"; COMP_POINT=${#1}; read -ra COMP_WORDS <<< "$1"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        _runner_completion; echo "${COMPREPLY[*]}"
    }
    try "runner optimizer.nest"; try "runner comp"; try "runner predict --format="; try "python script.py comp"
    try "python -c runner"
    complete -p runner
    """
    assert ask("bash", program, folder) == [
        "optimizer.nesterov=",
        "compare completion",
        "csv jsonl parquet pt",
        "",
        "",
        "complete -o default -F _runner_completion runner",
    ]


def test_fish_completes(folder: Path):
    read_at_start = folder / ".config" / "fish" / "conf.d"
    read_at_start.mkdir(parents=True)
    (folder / "runner.fish").rename(read_at_start / "runner.fish")
    program = 'complete -C "python -m runner optimizer.nest"; complete -C "runner comp"'
    assert [line.partition("\t")[0] for line in ask("fish", program, folder)] == [
        "optimizer.nesterov=",
        "compare",
        "completion",
    ]


def test_zsh_completes(folder: Path):
    program = """
    compdef() { : }
    compadd() { print -r -- "$*"; print -rl -- "${(@P)@[-1]}" }
    source runner.zsh
    words=(runner comp); CURRENT=2; PREFIX=comp
    _runner_completion
    """
    assert ask("zsh", program, folder) == ["-l -d shown_whole -a whole", "compare", "completion"]
