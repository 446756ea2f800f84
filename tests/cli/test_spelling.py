"""Commands in other spellings are refused in one line, with the command to type."""

from __future__ import annotations

import shlex

import pytest

from runner.cli.command import parse
from runner.cli.nearest import advice_in

VERB_FIRST = "a command begins with a verb"
NO_KEY = "no such key"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("mode=eval resume=RUN", "eval RUN"),
        ("resume=RUN mode=eval test=best", "eval RUN test=best"),
        ("mode=predict resume=RUN predict.format=pt predict.split=test", "predict RUN --format pt --split test"),
        ("resume=RUN optimizer.lr=0.1", "resume RUN optimizer.lr=0.1"),
        ("resume='a run'", "resume 'a run'"),
        ("resume=/tmp/lr=0.1", "resume /tmp/lr=0.1"),
        ("resume=RUN at=ba12", "fork RUN ba12"),
        ("-m resume=RUN at=ba5,ba9", "fork RUN ba5,ba9 -m"),
        ("resume RUN at=5", "fork RUN 5"),
        ("resume --config-dir mine RUN at=5 --allow-code", "fork RUN 5 --config-dir mine --allow-code"),
        ("rerun=RUN seed=1", "rerun RUN seed=1"),
        ("mode=check", "check"),
        ("mode=check resume=RUN", "check RUN"),
        ("+mode=explain model=mlp", "explain model=mlp"),
        ("mode=lr_range lr_range.batches=30", "lr-range --batches 30"),
        ("rerun=RUN mode=lr_range batches=30", "lr-range RUN --batches 30"),
        ("mode=prove kills=3 seed=3", "prove --kills 3 seed=3"),  # the seed of the experiment
        ("rerun=RUN mode=prove prove.keep=true prove.without=[a,b]", "prove RUN --keep --without a,b"),
        ("prove.save_interval=1ba prove.keep=false", "prove --save-interval 1ba"),
        ("mode=replay run=RUN replay.batch=5 replay.worst=2", "replay RUN 5 --worst 2"),
        ("run=RUN replay.batch=5 \"replay.picture=''\"", "replay RUN 5 --picture ''"),
        ("mode=verify run=RUN verify.pin=F verify.batch=3", "verify RUN --pin F --batch 3"),
        ("mode=sync resume=RUN", "sync RUN"),
        ("compare=[A,B] mode=compare", "compare A B"),
        ("mode=export export=[latest,x.pt]", "export latest x.pt"),
        ("verdict=[a,'b c=3'] verdict.metric=loss", "verdict a 'b c=3' --metric loss"),
        ("init=x", "init x"),
        ("list=callbacks", "list callbacks"),
        ("help=early_stopper", "help early_stopper"),
        ("runs.where='eval/loss<1 b=2' runs.sort=-loss runs.limit=null", "runs 'eval/loss<1 b=2' --sort -loss"),
        ("table.where=data=digits table.rows=[model,seed]", "table data=digits --rows model,seed"),
        ("mode=eval resume=RUN output=json", "eval RUN --json"),
        ("resume=RUN resume_allow=[a,b]", "resume RUN --allow-changes a,b"),
        ("resume=RUN allow_targets=[x.Y] allow_code=true", "resume RUN --allow-targets x.Y --allow-code"),
        ("resume=RUN allow_addresses=[x] allow_divergence=true", "resume RUN --allow-addresses x --allow-divergence"),
        ("--mode eval --resume RUN", "eval RUN"),
        ("--mode=eval --resume=RUN", "eval RUN"),
        ("--resume RUN optimizer.lr=1", "resume RUN optimizer.lr=1"),
        ("--resume optimizer.lr=1", "resume latest optimizer.lr=1"),
        ("--resume", "resume latest"),
        ("--config-dir mine mode=eval resume=RUN", "eval RUN --config-dir mine"),
        ("mode=chek seed=1", "check seed=1"),
    ],
)
def test_a_verb_written_as_a_key_is_refused(line: str, command: str):
    assert_refused(line, VERB_FIRST, command)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("output=json model=mlp", "--json model=mlp"),
        ("-m skip_finished=false seed=0,1", "--afresh -m seed=0,1"),
        ("-m seed=0,1 revive=all", "--revive all -m seed=0,1"),
        ("allow_divergence=true", "--allow-divergence"),
        ("mode=train model=mlp", "model=mlp"),
        ("resume=null model=mlp", "model=mlp"),
        ("eval resume=RUN", "eval RUN"),
        ("fork RUN at=5", "fork RUN 5"),
        ("replay RUN replay.batch=5", "replay RUN 5"),
        ("replay RUN 5 worst=2 debug=true", "replay RUN 5 --worst 2 --debug"),
        ("prove prove.kills=3", "prove --kills 3"),
        ("verify RUN batches=3", "verify RUN --batches 3"),
        ("runs 'eval/loss<1' runs.sort=loss", "runs 'eval/loss<1' --sort loss"),
        ("verdict a b verdict.budget=any", "verdict a b --budget any"),
        ("compare a b output=json", "compare a b --json"),
    ],
)
def test_a_word_or_an_option_written_as_a_key_is_refused(line: str, command: str):
    assert_refused(line, NO_KEY, command)


def assert_refused(line: str, reason: str, command: str) -> None:
    """Assert that a line is refused for this reason, with a command to type that is accepted."""
    arguments = shlex.split(line)
    with pytest.raises(ValueError) as raised:
        parse(arguments)
    message, fix = str(raised.value), f"runner {command}"
    assert message.endswith(f": {reason}; write {fix}") and "\n" not in message
    wrong = message.removesuffix(f": {reason}; write {fix}")
    assert wrong and all(part in " ".join(arguments) for part in wrong.split(" "))
    assert advice_in(raised.value).fix == fix
    parse([argument for argument in shlex.split(command) if argument != "--json"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mode=nothing", "mode=nothing: no such verb; allowed: check, compare, "),
        ("mode=test", "mode=test: no such verb; write runner eval RUN test=best"),
        ("--mode validate", "mode=validate: no such verb; write runner eval RUN"),
        ("mode=fit", "mode=fit: no such verb; runner without a verb trains"),
        ("mode=train,eval", "mode=train,eval: no such verb; did you mean 'train'? Allowed: check, "),
        ("mode=resume", "mode=resume: a command begins with a verb; write runner resume RUN"),
        ("rerun=a resume=b", "rerun=a resume=b: a command uses one run; give only one"),
        ("--ckpt_path=x.ckpt", "--ckpt_path=x.ckpt: no such option. Keys are written without dashes; write runner res"),
        ("--lr 0.1", "--lr: no such option. Keys are written without dashes; write optimizer.lr=0.1"),
        ("--max-epochs=3", "--max-epochs=3: no such option. Keys are written without dashes; write trainer.max_dura"),
    ],
)
def test_verbs_and_options_of_other_tools_are_refused(line: str, message: str):
    with pytest.raises(ValueError) as raised:
        parse(shlex.split(line))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "line",
    [
        *("", "seed=1", "prove seed=1", "eval RUN test=best", "runs limit=3 format=csv", "runs 'name=mode=eval'"),
        *("help mode", "list model", "resume resume", "~mode", "train.x=1", "fork eval 5", "+vars.mode=x", "check=1"),
    ],
)
def test_correct_commands_are_accepted(line: str):
    parse(shlex.split(line))
