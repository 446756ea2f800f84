"""The table of verbs agrees with the modules of verbs, the command line, the config and the documentation."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from runner.cli.command import parse
from runner.cli.verbs import TRAINING, VERBS, Option, Verb, find_verb
from runner.verbs import module_of

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = (bool, int, float, str, list)


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_a_verb_runs_a_documented_function(verb: Verb):
    """Each verb is in a file of its name in `runner/verbs/`."""
    module = module_of(verb)
    assert module.__name__ == f"runner.verbs.{verb.name.replace('-', '_')}"
    assert module.run.__doc__ and module.__doc__
    assert [*inspect.signature(module.run).parameters] == ["job" if verb.composes else "command"]
    if hasattr(module, "check"):
        assert [*inspect.signature(module.check).parameters] == ["command", "experiment"] and module.check.__doc__


def test_every_module_of_verbs_belongs_to_a_verb():
    files = {path.stem for path in (ROOT / "runner" / "verbs").glob("[!_]*.py")}
    assert files == {name.replace("-", "_") for name in VERBS}


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_the_example_of_a_verb_parses_to_the_verb(verb: Verb):
    program, *arguments = shlex.split(verb.example.partition(" >> ")[0])
    assert program == "runner" and parse(arguments).verb == verb.name


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_options_have_unique_names_and_defaults_of_their_types(verb: Verb):
    names = [option.name for option in verb.options]
    assert len({*names}) == len(names) == len(verb.defaults)
    for option in verb.options:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", option.name) and option.name not in ("json", "help", "version")
        assert option.help and "\n" not in option.help and not option.help.endswith(".")
        if isinstance(option.kind, tuple):
            assert option.default in option.kind
        else:
            assert option.kind in KINDS
            kind = tuple if option.kind is list else option.kind
            assert option.default is None or type(option.default) is kind
        assert option.kind is not bool or option.default is False


def test_verbs_have_no_names_of_keys_or_groups():
    """Otherwise `eval=RUN`, a verb written as a key, could be mistaken for a key of an experiment."""
    keys = {*yaml.safe_load((ROOT / "conf" / "config.yaml").read_text(encoding="utf-8"))}
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
    assert not {*VERBS, *(name.replace("-", "_") for name in VERBS)} & (keys | groups)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in VERBS)
    assert [verb.name for verb in VERBS.values()] == [*VERBS]


def test_only_seed_and_budget_are_both_keys_and_options():
    """`seed=1` after a verb with an option `--seed` sets the key; `budget` is the only other such name."""
    keys = {*yaml.safe_load((ROOT / "conf" / "config.yaml").read_text(encoding="utf-8"))}
    shared = {key for verb in VERBS.values() if verb.composes for key in verb.defaults if key in keys}
    assert shared == {"seed", "budget"}


def test_the_documentation_names_all_verbs():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(document.read_text(encoding="utf-8") for document in documents)
    for name in VERBS:
        assert name == "train" or re.search(rf"runner (-m )?{name}\b", text), name


def test_verbs_that_train_or_evaluate_keep_a_folder_and_run_on_all_ranks():
    for verb in VERBS.values():
        assert not (verb.trains and verb.uses_weights)
        assert verb.keeps_folder == (verb.trains or verb.uses_weights)
        trains_here = verb.keeps_folder or verb.name in ("lr-range", "replay", "verify")  # these keep no folder
        assert verb.on_all_ranks == trains_here
        assert verb.composes or not (verb.uses_run or verb.on_all_ranks or verb.can_be_swept)
    assert TRAINING == ("train", "resume", "fork", "rerun", "decide")


def test_verbs_have_the_options_that_the_program_reads():

    for verb in VERBS.values():
        trust = {"allow_targets", "allow_code", "allow_addresses"}
        assert trust <= {*verb.defaults} if verb.uses_run else not trust & {*verb.defaults}
        assert ("allow_divergence" in verb.defaults) == verb.trains
        assert ("allow_changes" in verb.defaults) == (verb.name in ("resume", "check", "explain"))
        assert ({"afresh", "revive"} <= {*verb.defaults}) == (verb.trains and verb.can_be_swept)


@pytest.mark.parametrize(
    ("words", "least", "most"), [("", 0, 0), ("A [B]", 1, 2), ("A B...", 2, 1000), ("[A...]", 0, 1000)]
)
def test_words_in_brackets_are_optional_and_those_with_dots_repeat(words: str, least: int, most: int):
    verb = Verb("x", help="says", example="runner x", words=words)
    assert (verb.least_words, verb.most_words) == (least, most)


def test_defaults_of_options_have_underscores():
    options = (Option("save-interval", str, "5ba", "between saves"), Option("keep", bool, False, "keeps all"))
    verb = Verb("x", help="says", example="runner x", options=options)
    assert verb.defaults == {"save_interval": "5ba", "keep": False}


def test_only_verify_and_verdict_exit_with_125_for_git_bisect():
    assert {verb.name: verb.code_if_refused for verb in VERBS.values() if verb.code_if_refused != 2} == {
        "verify": 125,
        "verdict": 125,
    }


@pytest.mark.parametrize("name", ["chek", "", "mode", "lr_range"])
def test_an_unknown_verb_is_refused_with_the_nearest_name(name: str):
    with pytest.raises(ValueError, match="no such verb; .*llowed: check, compare, completion, ") as raised:
        find_verb(name)
    assert ("did you mean" in str(raised.value)) == (name in ("chek", "lr_range"))


@pytest.mark.parametrize("module", ["runner.cli.verbs", "runner.cli.command", "runner.program.start"])
def test_the_command_line_is_parsed_without_torch_hydra_or_verbs(module: str):
    late = r"torch|hydra|omegaconf|numpy|rich|runner\.verbs\..*"
    program = f"import re, sys, {module}; print([name for name in sys.modules if re.fullmatch({late!r}, name)])"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"


def test_the_verb_in_the_extending_guide_runs(tmp_path: Path):
    row, content = re.findall(
        r"```py\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), re.DOTALL
    )
    for package in ("runner", "callbacks", "algorithms", "conf"):
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True)
    (tmp_path / "runner" / "verbs" / "parameters.py").write_text(content)
    table = tmp_path / "runner" / "cli" / "verbs.py"
    table.write_text(table.read_text().replace("_ROWS = (\n", f"_ROWS = (\n    {row.strip()},\n"))
    finished = subprocess.run(
        [sys.executable, "-m", "runner", "parameters", "model=mlp", "callbacks=none"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    parameters = (64 + 1) * 128 + (128 + 1) * 128 + (128 + 1) * 10
    assert [line.split() for line in finished.stdout.splitlines()] == [
        ["model=mlp", "callbacks=none"],
        ["parameters", f"{parameters:,}"],
    ]
    assert not (tmp_path / "outputs").exists()
