"""Completion: the candidates for a command line, and the scripts for bash, fish and zsh."""

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
    """Return the candidates for the last word of a line."""
    return [word for word, _ in complete(line)]


@pytest.mark.parametrize(
    ("line", "candidates"),
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
        ("runner data=imagefolder data.path=", []),  # the folder has no files
        ("runner optimizer.lr=", []),
        ("python train.py mod", []),
        ("runner", []),
        ("", []),
    ],
)
def test_candidates_complete_the_last_word_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, candidates: list[str]
):
    monkeypatch.chdir(tmp_path)
    assert words(line) == sorted(candidates)


def test_all_verbs_groups_and_options_are_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert {*VERBS} <= {*words("runner ")}
    assert {f"{file.name}=" for file in CONF.iterdir() if file.is_dir()} <= {*words("runner ")}
    for verb in VERBS.values():
        assert {f"--{option.name}" for option in verb.options} <= {*words(f"runner {verb.name} --")}


def test_choices_and_runs_of_the_user_are_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_values_of_path_keys_complete_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for file in ("data/train/a.png", "data/tiny.txt", ".hidden/x", "da ta/x"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    typed = "runner data=imagefolder data.path="
    assert words(typed) == ["data.path=data/"]  # no hidden files, and no names that need quotes in a shell
    assert words(f"{typed}.h") == ["data.path=.hidden/"]
    assert words(f"{typed}data/t") == ["data.path=data/tiny.txt", "data.path=data/train/"]
    assert words(f"{typed}{tmp_path}/dat") == [f"data.path={tmp_path}/data/"]
    assert words("runner trainer.load_path=dat") == ["trainer.load_path=data/"]
    assert words("runner optimizer.lr=d") == words(f"{typed}nowhere/") == []


def test_descriptions_escape_control_characters(tmp_path: Path, run_here: Any, monkeypatch: Any):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# A\x1b[31m\t network.\n")
    monkeypatch.setenv(LINE, "runner model=mi")
    assert run_here("completion", "candidates", code=0).out == "model=mine\tA\\x1b[31m\\t network\n"


@pytest.fixture
def shell_folder(tmp_path: Path) -> Path:
    """A folder with the commands `runner` and `python`, and a script for each shell."""
    for name, command in (("runner", f'"{sys.executable}" -m runner'), ("python", f'"{sys.executable}"')):
        file = tmp_path / name
        file.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        file.chmod(0o755)
    for script in SHELLS.iterdir():
        shutil.copy(script, tmp_path)
    return tmp_path


def run_shell(shell: str, program: str, folder: Path) -> list[str]:
    """Return the lines that a shell program prints; skip the test if the shell is not installed."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder / ".config")}
    finished = subprocess.run([shell, "-c", program], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return finished.stdout.splitlines()


def test_bash_completes(shell_folder: Path):
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
    assert run_shell("bash", program, shell_folder) == [
        "optimizer.nesterov=",
        "compare completion",
        "csv jsonl parquet pt",
        "",
        "",
        "complete -o default -F _runner_completion runner",
    ]


def test_fish_completes(shell_folder: Path):
    startup = shell_folder / ".config" / "fish" / "conf.d"
    startup.mkdir(parents=True)
    (shell_folder / "runner.fish").rename(startup / "runner.fish")
    program = 'complete -C "python -m runner optimizer.nest"; complete -C "runner comp"'
    assert [line.partition("\t")[0] for line in run_shell("fish", program, shell_folder)] == [
        "optimizer.nesterov=",
        "compare",
        "completion",
    ]


def test_zsh_completes(shell_folder: Path):
    program = """
    compdef() { : }
    compadd() { print -r -- "$*"; print -rl -- "${(@P)@[-1]}" }
    source runner.zsh
    words=(runner comp); CURRENT=2; PREFIX=comp
    _runner_completion
    """
    assert run_shell("zsh", program, shell_folder) == ["-l -d shown_whole -a whole", "compare", "completion"]
