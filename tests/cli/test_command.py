"""Parsing a command into its verb, words, options, and overrides for Hydra."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from runner.cli.command import Command, parse
from runner.cli.nearest import advice_in
from runner.cli.verbs import VERBS, Verb
from runner.failures.errors import WrongKey


def typed(line: str) -> tuple[str, tuple[str, ...], dict[str, Any], tuple[str, ...]]:
    """Parse a command, and return its verb, words, options that differ from their defaults, and overrides."""
    command = parse(shlex.split(line))
    assert {*command.options} == {*command.row.defaults}
    changed = {key: value for key, value in command.options.items() if value != command.row.defaults[key]}
    return command.verb, command.words, changed, command.overrides


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ("train", (), {}, ())),
        ("model=mlp", ("train", (), {}, ("model=mlp",))),
        ("train model=mlp", ("train", (), {}, ("model=mlp",))),
        ("resume RUN optimizer.lr=1", ("resume", ("RUN",), {}, ("optimizer.lr=1",))),
        ("resume optimizer.lr=1 RUN ~callbacks.x", ("resume", ("RUN",), {}, ("optimizer.lr=1", "~callbacks.x"))),
        ("fork RUN ba12 +callbacks=ema", ("fork", ("RUN", "ba12"), {}, ("+callbacks=ema",))),
        ("replay RUN", ("replay", ("RUN",), {}, ())),
        ("replay RUN -1", ("replay", ("RUN", "-1"), {}, ())),  # refused as a batch, not as an option
        ("eval", ("eval", (), {}, ())),
        ("compare A B C seed=1", ("compare", ("A", "B", "C"), {}, ("seed=1",))),
        ("runs", ("runs", (), {}, ())),
        ("runs 'a<1' b=2 +c", ("runs", ("a<1", "b=2", "+c"), {}, ())),  # all are conditions
        ("verdict lr=1 'lr=2 seed=1'", ("verdict", ("lr=1", "lr=2 seed=1"), {}, ())),
        ("export RUN a=b.pt", ("export", ("RUN", "a=b.pt"), {}, ())),
        ("help model=mlp", ("help", ("model=mlp",), {}, ())),
        ("model=mlp eval", ("train", (), {}, ("model=mlp", "eval"))),  # Hydra refuses the word
    ],
)
def test_words_follow_a_verb_and_overrides_are_for_hydra(line: str, expected: object):
    assert typed(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("prove --kills 3", {"kills": 3}),
        ("prove --kills=3 --keep", {"kills": 3, "keep": True}),
        ("prove --save-interval 2ep --seed 1", {"save_interval": "2ep", "seed": 1}),
        ("prove --kills 3 --kills 4", {"kills": 4}),
        ("lr-range --start=1e-4 --end 1", {"start": 1e-4, "end": 1.0}),
        ("lr-range --picture ''", {"picture": ""}),
        ("verify RUN --tolerance=0.1 --pin=a=b.yaml", {"tolerance": 0.1, "pin": "a=b.yaml"}),
        ("predict RUN --format pt --split=test", {"format": "pt", "split": "test"}),
        ("runs --limit -1 --sort -loss", {"limit": -1, "sort": "-loss"}),
        ("runs --limit 0", {"limit": 0}),
        ("resume RUN --allow-changes a,b", {"allow_changes": ("a", "b")}),
        ("resume RUN --allow-changes '[a,b]' --allow-changes=c", {"allow_changes": ("a", "b", "c")}),
        ("resume RUN --allow-changes 'a[0],b' --allow-changes '[c'", {"allow_changes": ("a[0]", "b", "[c")}),
        ("resume RUN --allow-changes 'a,b[0]'", {"allow_changes": ("a", "b[0]")}),
        ("eval RUN --allow-code --allow-targets a.B", {"allow_code": True, "allow_targets": ("a.B",)}),
        ("prove --without a --without b,c", {"without": ("a", "b", "c")}),  # replaces the default
        ("prove --without=", {"without": ()}),
        ("fork RUN 5 --allow-divergence", {"allow_divergence": True}),
        ("-m --revive all --afresh seed=0,1", {"revive": ("all",), "afresh": True}),
    ],
)
def test_options_are_converted_to_their_types(line: str, expected: dict[str, Any]):
    assert typed(line)[2] == expected


@pytest.mark.parametrize(
    ("line", "verb", "overrides"),
    [
        ("-m check seed=0,1", "check", ("seed=0,1", "-m")),
        ("check -m seed=0,1", "check", ("seed=0,1", "-m")),
        ("--multirun eval RUN", "eval", ("--multirun",)),
        ("--config-dir mine -m eval RUN", "eval", ("--config-dir", "mine", "-m")),
        ("eval --config-dir=mine RUN", "eval", ("--config-dir=mine",)),
        ("--config-dir eval prove", "prove", ("--config-dir", "eval")),  # a folder named eval
        ("--config-dir mine list model", "list", ("--config-dir", "mine")),
        ("list --config-dir=mine model", "list", ("--config-dir=mine",)),
        ("--cfg job model=mlp", "train", ("model=mlp", "--cfg", "job")),
        ("resume RUN -c job --resolve", "resume", ("-c", "job", "--resolve")),
        ("prove --info all-x --hydra-help", "prove", ("--info", "all-x", "--hydra-help")),
        ("-m fork RUN ba5,ba9 optimizer.lr=1", "fork", ("optimizer.lr=1", "+at=ba5,ba9", "-m")),
        ("fork RUN ba5,ba9 --multi", "fork", ("+at=ba5,ba9", "--multirun")),
        ("--config-d mine eval RUN", "eval", ("--config-dir", "mine")),
        ("--config-d=mine eval RUN", "eval", ("--config-dir=mine",)),
        ("--multi seed=0,1 --res", "train", ("seed=0,1", "--multirun", "--resolve")),
    ],
)
def test_options_of_hydra_may_be_anywhere(line: str, verb: str, overrides: tuple[str, ...]):
    command = parse(shlex.split(line))
    assert (command.verb, command.overrides) == (verb, overrides)


def test_a_path_with_an_equals_sign_is_a_word_if_it_exists_or_cannot_be_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep" / "lr=0.1").mkdir(parents=True)
    assert typed("resume sweep/lr=0.1 seed=1") == ("resume", ("sweep/lr=0.1",), {}, ("seed=1",))
    assert typed("compare sweep/lr=0.1 sweep/lr=0.1")[1] == ("sweep/lr=0.1", "sweep/lr=0.1")
    with pytest.raises(ValueError, match="resume: needs RUN"):
        parse(["resume", "sweep/lr=0.2"])
    for path in ("/sweep/lr=0.2", "../lr=0.2", "outputs/lr=0.2", "s3://bucket/lr=0.2"):  # no key begins like these
        assert typed(f"resume {path} seed=1") == ("resume", (path,), {}, ("seed=1",))
    (tmp_path / "seed=1").touch()
    assert typed("train seed=1") == ("train", (), {}, ("seed=1",))  # `train` takes no words


@pytest.mark.parametrize(
    ("line", "message", "key"),
    [
        ("resume", "resume: needs RUN; write runner resume RUN, such as runner resume latest ", "RUN"),
        ("resume a b", "resume: takes RUN, not a b; write runner resume RUN, such as ", "RUN"),
        ("fork RUN", "fork: takes RUN BATCH, not RUN; write runner fork RUN BATCH, such as ", "RUN"),
        ("compare A", "compare: takes RUN RUN..., not A; write runner compare RUN RUN..., ", "RUN"),
        ("init", "init: needs FOLDER; write runner init FOLDER, such as ", "FOLDER"),
        ("list a b", "list: takes [GROUP], not a b; write runner list [GROUP], such as ", "GROUP"),
        ("fork RUN x", "BATCH='x': must be the number of a batch, such as ba1200", "BATCH"),
        ("fork RUN ba0", "BATCH='ba0': must be the number of a batch, such as ba1200", "BATCH"),
        ("-m fork RUN ba5,x", "BATCH='x': must be the number of a batch, such as ba1200", "BATCH"),
        ("fork RUN 5,9", "BATCH='5,9': takes one batch; add -m to begin a fork at each", "BATCH"),
        ("prove --kills", "--kills: needs a value (number of kills, during ", "--kills"),
        ("prove --kills --keep", "--kills: needs a value (number of kills, during ", "--kills"),
        ("prove --kills x", "--kills='x': must be a whole number", "--kills"),
        ("prove --kills 1.5", "--kills='1.5': must be a whole number", "--kills"),
        ("lr-range --end ten", "--end='ten': must be a number", "--end"),
        ("prove --keep=false", "--keep='false': takes no value", "--keep"),
        ("predict R --format xlsx", "--format='xlsx': allowed: csv, jsonl, parquet, pt", "--format"),
        ("predict R --split evall", "--split='evall': did you mean 'eval'? Allowed: eval, test, train", "--split"),
        ("prove --kill 3", "--kill: prove has no such option; did you mean --kills? Allowed: ", "--kill"),
        ("eval R --split test", "--split: is an option of predict, not of eval", "--split"),
        ("--kills 3 prove", "--kills: is an option of prove; write it after the verb", "--kills"),
        ("lr-rang --batches 3", "lr-rang: no such verb; did you mean 'lr-range'? Allowed: ", ""),
        ("eval R --lr 0.1", "--lr: no such option. Keys are written without dashes; write optimizer.lr=0.1", ""),
        ("runs --lr 1", "--lr: runs has no such option; allowed: --sort, --format, --limit", "--lr"),
        ("help --lr", "--lr: help has no such option; allowed: none", "--lr"),
        ("-lr", "-lr: no such option. Keys are written without dashes; write optimizer.lr=...", ""),
        ("-x=3", "-x=3: no such option. Keys are written without dashes: x=3", ""),
        ("--config-=mine", "--config-=mine: no such option. ", ""),  # abbreviates two options
        ("model=mlp --confg", "--confg: no such option. Did you mean --cfg? Keys are written without dashes: ", ""),
        ("-m resume R seed=1,2", "-m: resume takes one experiment at a time; leave out -m", "-m"),
        ("prove --multirun", "-m: prove takes one experiment at a time; leave out -m", "-m"),
        ("-m runs", "-m: runs composes no config and takes no such option; leave it out", "-m"),
        ("help --cfg job", "--cfg: help composes no config and takes no such option; leave it out", "--cfg"),
    ],
)
def test_a_wrong_command_is_refused_with_a_suggestion(line: str, message: str, key: str):
    with pytest.raises(ValueError) as raised:
        parse(shlex.split(line))
    assert str(raised.value).startswith(message)
    assert (raised.value.key if isinstance(raised.value, WrongKey) else advice_in(raised.value).key) == key


VALUES = {bool: [True], int: [3], float: [0.25], str: ["a=b c", "-x"], list: [("a", "b"), ()]}


def many_commands(verb: Verb) -> list[Command]:
    """Return commands with each option of a verb, with all options, and with words and overrides."""
    count = max(verb.least_words, min(verb.most_words, 2))
    words = ["word 1", "ba2"][:count]
    swept = ["-m"] * verb.can_be_swept
    overrides = ["model=mlp", "~callbacks.x", *swept] if verb.composes else ["--config-dir", "mine"]
    single = [
        {option.key: value}
        for option in verb.options
        for value in (option.kind if isinstance(option.kind, tuple) else VALUES[option.kind])
    ]
    together: dict[str, Any] = {key: value for options in single for key, value in options.items()}
    return [
        Command.of(verb.name, *words[: verb.least_words]),
        Command.of(verb.name, *words, overrides=overrides),
        *(Command.of(verb.name, *words, **options) for options in [*single, together]),
    ]


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_the_arguments_of_a_command_parse_to_the_same_command(verb: Verb):
    for command in many_commands(verb):
        assert parse(command.arguments) == command


def test_the_arguments_of_a_fork_at_several_batches_parse_to_the_same_command():
    command = parse(["-m", "fork", "RUN", "5,9", "seed=1"])
    assert command.arguments == ["fork", "RUN", "5,9", "seed=1", "-m"] and parse(command.arguments) == command


def test_a_command_names_its_run_and_its_batch():
    assert (parse(["fork", "RUN", "ba5"]).run, parse(["fork", "RUN", "ba5"]).batch) == ("RUN", "ba5")
    assert (parse(["replay", "RUN"]).run, parse(["replay", "RUN"]).batch) == ("RUN", None)
    assert (parse(["export", "RUN", "x.pt"]).run, parse(["compare", "A", "B"]).run) == (None, None)
    assert (parse([]).run, parse(["eval"]).run) == (None, None)
    assert parse([]) == Command.of("train")


def test_a_command_made_in_python_equals_the_parsed_one():
    command = Command.of("eval", "RUN", allow_targets=("a.B",))
    assert command == parse(["eval", "RUN", "--allow-targets", "a.B"])
    with pytest.raises(ValueError, match="evl: no such verb; did you mean 'eval'"):
        Command.of("evl")
