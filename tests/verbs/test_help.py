"""`--help`, `runner help NAME` and `runner list`: their text, their speed, and the user's files that they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from composed_configs import composed
from python_process import PATIENCE
from tiers import fast

from runner import __version__
from runner.cli.catalogue import CONF, GROUPS, choices, top_keys
from runner.cli.command_line import merge_repeated
from runner.cli.verb import Verb
from runner.cli.verbs import VERBS
from runner.config import build
from runner.config.experiment import Experiment
from runner.verbs.help import explain, overview

CHOICES = choices(CONF)
SLOW = {"torch", "mlflow", "hydra", "omegaconf", "rich", "numpy"}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a width of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_help_and_lists_start_fast(tmp_path: Path):
    """Each takes about 0.05 s of CPU time, a tenth of the limit, and imports no large package."""
    commands = ["--help", "--version", "list", "help early_stopper", "help prove", "runs", "completion bash"]
    program = f"""
import sys, time
from runner.__main__ import main
start = time.process_time()
for command in {commands!r}:
    sys.argv = ["runner", *command.split()]
    assert main() == 0, command
print("seconds", time.process_time() - start)
print("imported", sorted({SLOW!r} & set(sys.modules)))
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    *_, seconds, imported = finished.stdout.splitlines()
    assert imported == "imported []" and finished.stderr == ""
    assert float(seconds.split()[1]) < 0.5 * len(commands)
    assert list(tmp_path.iterdir()) == []


def test_the_overview_lists_all_verbs_groups_and_choices():
    lines = [*overview(CONF)]
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    text = "\n".join(lines)
    for verb in VERBS.values():
        assert re.search(rf"^  {verb.name} +{re.escape(verb.help)}\n +{re.escape(verb.example)}$", text, re.MULTILINE)
    words = {*re.findall(r"[\w/]+", text)}
    assert {choice.name for choice in CHOICES} | {*GROUPS} - {"vars"} <= words


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_the_help_of_a_verb_shows_its_words_and_options(verb: Verb):
    lines = [*explain(verb.name, CONF)]
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    assert lines[0] == f"runner {verb.name}: {verb.help}"
    assert f"{lines[1]} ".startswith(f"  runner {verb.name} {verb.words} ".replace("  ", " ").replace(" ", "  ", 1))
    assert ("[KEY=VALUE] ..." in lines[1]) == verb.composes and ("[--OPTION VALUE]" in lines[1]) == bool(verb.options)
    assert lines[-2:] == ["Example", f"  {verb.example}"]
    assert [re.findall(r"^  --([\w-]+)", line)[0] for line in lines if line.startswith("  --")] == [
        option.name for option in verb.options
    ]
    assert any(line.startswith("  RUN  a folder of a run") for line in lines) == bool(verb.uses_run)


def test_the_option_help_shows_the_help_of_a_verb(run_here: Any):
    text = run_here("help", "prove", code=0).out
    assert text.startswith("runner prove: kills a run")
    for typed in (["prove", "--help"], ["--help", "prove"], ["prove", "-h", "--kills", "x"], ["prove", "RUN", "--he"]):
        assert run_here(*typed, code=0).out == text
    assert run_here("--help", code=0).out == run_here("help", code=0).out


def test_verbs_are_listed(run_here: Any):
    lines = run_here("list", "verbs", code=0).out.splitlines()
    assert [line.split()[0] for line in lines] == [*VERBS]


def test_the_help_of_a_choice_shows_its_docstring_keys_and_example():
    lines = [*explain("early_stopper", CONF)]
    assert lines[:2] == [
        "+callbacks=early_stopper: a choice of callbacks",
        "Stops training when more than `patience` has passed since the metric was best.",
    ]
    start = lines.index("Keys of callbacks.early_stopper, and their defaults")
    assert lines[start + 1 : start + 5] == [
        "  monitor           loss  name of the metric; 'loss' is the mean loss of an",
        "                          evaluator.",
        "  dataloader_label  eval  label of the evaluator that has the metric, or",
        "                          'train'.",
    ]
    assert lines[lines.index("Example") + 1] == "  runner +callbacks=early_stopper callbacks.early_stopper.monitor=loss"


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.typed)
def test_each_choice_has_a_summary_and_comments_on_its_keys(choice: Any):
    lines = [*explain(f"{choice.group}.{choice.name}", CONF)]
    assert lines[0] == f"{choice.typed}: a choice of {choice.group}"
    assert choice.summary and len(lines[1]) > 3
    assert all(line == line.rstrip() for line in lines)
    if choice.group not in ("experiment", "sweep"):
        assert all(key.comment for key in choice.keys), choice.keys


NEEDS_MORE = ("experiment", "sweep", "model", "data", "optimizer/param_groups")
"""Groups whose examples need data or further packages."""
ALONE = {choice.typed: choice for choice in CHOICES if choice.group not in NEEDS_MORE}
ONE_OF_EACH_GROUP = (
    "optimizer=adam",
    "scheduler=cosine_annealing",
    "+callbacks=load_checkpoint",
    "+algorithms=ngram_embedding",
)


@pytest.mark.parametrize("typed", fast(ALONE, *ONE_OF_EACH_GROUP))
def test_the_example_of_a_choice_composes_and_binds(typed: str):
    choice = ALONE[typed]
    lines = [*explain(f"{choice.group}.{choice.name}", CONF)]
    arguments = merge_repeated(lines[lines.index("Example") + 1].split()[1:])
    build.check(Experiment(composed(*arguments)))


def first(name: str) -> str:
    """Return the first line of the help about a name."""
    return next(iter(explain(name, CONF)))


def test_keys_verbs_groups_and_classes_are_explained():
    assert first("seed") == "seed=0"
    rows = "\n".join(explain("optimizer.lr", CONF))
    assert re.search(r"^  optimizer=sgd +0\.1 +learning rate", rows, re.MULTILINE)
    assert [*explain("lr", CONF)][1:] == [*explain("optimizer.lr", CONF)][1:]
    assert re.search(r"^  --kills N +5 +number of kills, during ", "\n".join(explain("prove", CONF)), re.MULTILINE)
    assert first("scheduler") == f"scheduler: {GROUPS['scheduler']}"
    assert [*explain("EarlyStopper", CONF)] == [*explain("+callbacks=early_stopper", CONF)]
    assert "State: in" in first("runner.State")
    both = [line for line in explain("schedule_free", CONF) if ": a choice of" in line]
    assert [line.partition(":")[0] for line in both] == ["optimizer=schedule_free", "+algorithms=schedule_free"]
    for key in top_keys():
        assert [*explain(key.name, CONF)]


def test_configs_and_classes_of_the_user_are_shown(tmp_path: Path, run_here: Any):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# My network.\n_target_: own.Net\nwidth: 3 # units\n")
    (tmp_path / "conf" / "model" / "broken.yaml").write_text("# Broken.\n_target_: [\n\x00")
    (tmp_path / "own.py").write_text('class Net:\n    """Nets.\n\n    Args:\n        width: units."""\nraise 1\n')
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "watch.py").write_text('class Watch:\n    """Watches\n    all."""\n\nclass _No: ...\n')
    (tmp_path / "callbacks" / "broken.py").write_text("class (")
    assert re.search(r"^  mine +My network \(yours\)$", run_here("list", "model", code=0).out, re.MULTILINE)
    text = run_here("help", "mine", code=0).out
    assert text.startswith("model=mine: a choice of model of your own\nMy network.\n\nNets.\n")
    assert "  width  3  units.\n" in text and "  own.py\n" in text
    text = run_here("list", "callbacks", code=0).out
    assert "_target_=callbacks.watch.Watch" in text and "_No" not in text
    assert "Watches" in run_here("help", "Watch", code=0).out
    assert "broken" in run_here("--help", code=0).out
    assert run_here("help", "broken", code=0).out.startswith("model=broken")


def test_built_in_callbacks_of_a_checkout_are_not_shown_as_the_users(run_here: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    text = run_here("list", "callbacks", code=0).out
    assert "early_stopper" in text and "yours" not in text


def test_malicious_files_of_a_folder_are_read_as_data(tmp_path: Path, run_here: Any):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "callbacks").mkdir()
    levels = "".join(f"b{n + 1}: &a{n + 1} {{{', '.join(f'k{k}: *a{n}' for k in range(9))}}}\n" for n in range(20))
    (tmp_path / "conf" / "model" / "bomb.yaml").write_text(f"# \x1b[31m\u202eBomb.\nb0: &a0 {{x: 1}}\n{levels}")
    (tmp_path / "conf" / "model" / "loop.yaml").write_text("# Loop.\na: &a {b: *a}\n")
    (tmp_path / "conf" / "model" / "zero.yaml").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "conf" / "model" / "pipe.yaml")
    os.mkfifo(tmp_path / "callbacks" / "pipe.py")
    (tmp_path / "callbacks" / "deep.py").write_text("(" * 10_000)
    for command in ("--help", "list", "help bomb", "help loop", "help zero", "help pipe"):
        out = run_here(*command.split(), code=0).out
        assert all(character.isprintable() or character == "\n" for character in out)


def test_version_prints_the_version(run_here: Any):
    assert run_here("--version", code=0).out == f"runner {__version__}\n"
    assert run_here("model=mlp", "--vers", code=0).out == f"runner {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            ["help", "ealry_stopper"],
            "NAME='ealry_stopper': nothing has this name; did you mean 'early_stopper'?",
        ),
        (["help", "a\x1b[31m"], "NAME='a\\x1b[31m': nothing has this name; runner --help lists"),
        (
            ["help", "a", "b"],
            "help: takes [NAME], not a b; write runner help [NAME], such as runner help early_stopper",
        ),
        (["help", "os.system"], "NAME='os.system': nothing has"),
        (["list", "calbacks"], "GROUP='calbacks': did you mean 'callbacks'?"),
        (["list", "model", "seed=1"], "list: takes [GROUP], not model seed=1; write runner list [GROUP], such as "),
        (["-m", "help"], "-m: help composes no config and takes no such option"),
        (["completion", "tcsh"], "SHELL='tcsh': allowed: bash, fish, zsh"),
        (["--shell-completion", "install=bash"], "--shell-completion: to set up completion, use the command"),
    ],
    ids=str,
)
def test_a_wrong_help_command_is_refused_in_one_line(run_here: Any, tmp_path: Path, typed: list[str], message: str):
    _, out, err = run_here(*typed, code=2)
    assert err.startswith(f"error: {message}") and err.count("\n") == 1 and out == ""
    assert list(tmp_path.iterdir()) == []


def test_help_prints_on_rank_0_only(tmp_path: Path):
    command = [sys.executable, "-m", "runner", "help", "ema"]
    finished = subprocess.run(command, cwd=tmp_path, env=os.environ | {"RANK": "1"}, capture_output=True, check=True)
    assert finished.stdout == finished.stderr == b""
