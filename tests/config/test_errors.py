"""Errors of Hydra, OmegaConf and constructors become one message that says what to change."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from tiers import fast

from runner.config.composing import initialized
from runner.config.errors import CONFIG_ERRORS, config_errors, explain
from runner.config.suggestions import _compose_without, _usual, about_replaced
from runner.failures.errors import ConstructorFailed, NoSuchArgument, WrongConfig, WrongKey
from runner.failures.facts import add_raiser, annotate
from runner.timing.event import Event

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture(autouse=True)
def clear_hydra() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()


def explained(*overrides: str) -> str:
    """Return the message about a command that does not compose."""
    with pytest.raises(CONFIG_ERRORS) as raised, initialized(CONF):
        config = compose("config", list(overrides))
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return explain(raised.value, overrides, CONF).message


@pytest.mark.parametrize(
    ("overrides", "message"),
    fast(
        [
            (["model=mpl"], "model=mpl: no such choice; did you mean 'mlp'? Allowed: dpo, gpt, "),
            (["model="], "model=: no such choice; allowed: dpo, gpt, "),
            # The choice belongs to another group.
            (
                ["+algorithms=speed_monitor"],
                "algorithms=speed_monitor: no such choice; did you mean +callbacks=speed_mon",
            ),
            (
                ["model=schedule_free"],
                "model=schedule_free: no such choice; did you mean optimizer=schedule_free or +alg",
            ),
            (
                ["optimizer.lrr=1"],
                "optimizer.lrr: optimizer has no key 'lrr'; did you mean 'lr'? Allowed: fused, lr, momentum, ",
            ),
            # The allowed keys are those of the chosen optimizer.
            (
                ["optimizer=adam", "optimizer.momentum=1"],
                "optimizer.momentum: optimizer has no key 'momentum'; allowed: b",
            ),
            # The same if another key is wrong too.
            (
                ["optimizer=adam", "optimizer.momentum=1", "optimizer.x=1"],
                "optimizer.momentum: optimizer has no key 'momentum'; allowed: b",
            ),
            # The key belongs to another section, or to a nested one.
            (
                ["model=mlp", "model.hidden=3"],
                "model.hidden: model has no key 'hidden'; did you mean model.module.hidden?",
            ),
            (["lr=1"], "lr=1: no such key; write optimizer.lr=1"),
            (
                ["model=mlp", "model.module={width: 3}"],
                "model.module.width: model.module has no key 'width'; allowed: drop",
            ),
            (["model.module.x.y=1"], "model.module.x.y: model.module has no key 'x'"),
            (
                ["callbacks.mlflow_logger.tags.team=x"],
                "callbacks.mlflow_logger.tags.team: callbacks.mlflow_logger.tags is empty; "
                "add to it with +callbacks.mlflow_logger.tags.team=...",
            ),
            (["seed.x=1"], "seed.x: seed is a single value and has no keys"),
            (["folds.count=3"], "folds.count: folds is null in this run; runner help folds shows what sets it"),
            (["sede=1"], "sede: no key 'sede'; did you mean 'seed'? A value of your own"),
            (
                ["~callbacks.lr_monitor"],
                "callbacks.lr_monitor: 'lr_monitor' is not part of this run; add it with +",
            ),
            (["callbacks.lr_monitor.x=1"], "callbacks.lr_monitor.x: 'lr_monitor' is not part of this run"),
            (["callbacks.lr_moniter.x=1"], "callbacks.lr_moniter.x: there is no 'lr_moniter'; did you mean 'lr_"),
            (["~model", "model.x=1"], "model.x: there is no model in this run; choose one with model=<name>"),
            (["~run_name"], "run_name: is already null; there is nothing to remove"),
            (["+seed=1"], "+seed: is already set; write seed=... without the +"),
            (["+model=mlp"], "+model: there is one already; write model=... without the +"),
            (
                ["+callbacks=lr_monitor", "+callbacks=speed_monitor"],
                "callbacks: given more than once; for several in one list write",
            ),
            (["seed=1", "model=null"], "model=null: a group takes the name of a choice; allowed: dpo, gpt, "),
            (["data=3"], "data=3: a group takes the name of a choice; allowed: chat, cifar10, digits, "),
            (["seed=1", ""], "'': an argument is empty; a shell variable may be unset"),
            (["nonsense"], "nonsense: neither key=value nor a verb"),
            (["speed_monitor"], "speed_monitor: has no key; did you mean +callbacks=speed_monitor?"),
            (["evaluate"], "evaluate: no such word; write runner eval RUN"),
            (["mlp"], "mlp: has no key; did you mean model=mlp?"),
            (["model", "mlp"], "model: has no value; write model=..., without spaces"),
            (
                ["optimizer.param_groups=[{lr: 1}]"],
                "optimizer.param_groups=[...]: a list cannot replace a section of keys; write optimizer.",
            ),
            (["optimizer=SGD"], "optimizer=SGD: no such choice; did you mean 'sgd'?"),
            (["chek"], "chek: no such verb; did you mean runner check?"),
            (["seed=1", "+callbacks=[a"], "+callbacks=[a: cannot be read; write key=value"),
            (
                ["run_name=a(b"],
                "run_name=a(b: the value cannot be parsed; write it with two pairs of quotes: 'run_name=\"a(b",
            ),
            (["seed=${nothing}"], "seed: uses ${nothing}, but there is no such key"),
            (["seed=???"], "seed: needs a value; write seed=..."),
            # The class has this argument, but the config does not set it.
            (
                ["model=mlp", "model.class_weights=balanced"],
                "model.class_weights: runner.ClassificationModel takes it, but nothing in this run sets it; add",
            ),
        ],
        *("model=mpl", "+algorithms=speed_monitor", "optimizer=adam optimizer.momentum=1", "model=mlp model.hidden=3"),
        *("lr=1", "seed.x=1", "sede=1", "callbacks.lr_moniter.x=1", "~model model.x=1", "+model=mlp", "data=3"),
        *("nonsense", "speed_monitor", "chek", "run_name=a(b", "model=mlp model.class_weights=balanced"),
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_does_not_compose_gets_one_line_with_the_fix(overrides: list[str], message: str):
    line = explained(*overrides)
    assert line.startswith(message)
    assert "\n" not in line
    assert "_target_" not in line and "_partial_" not in line


def test_choices_of_a_config_dir_are_suggested(tmp_path: Path):
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / "my_own.yaml").write_text("my_own: {_target_: a.B}\n")
    with pytest.raises(CONFIG_ERRORS) as raised, initialized(CONF):
        compose("config", ["my_own"])
    arguments = [f"--config-dir={tmp_path}", "my_own"]
    assert explain(raised.value, arguments, CONF).message == "my_own: has no key; did you mean +algorithms=my_own?"


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (
            ["callbacks=speed_monitor"],
            "callbacks=speed_monitor replaces mlflow_logger, checkpoint_saver, crash_bundle, ",
        ),
        (["seed=1", "callbacks=[lr_monitor,speed_monitor]"], "callbacks=[lr_monitor,speed_monitor] replaces mlflow_"),
        (["-m", "algorithms=ema,swa"], "algorithms=ema,swa replaces batch_augment, label_smoothing; +algorithms=ema"),
        (["algorithms=ema", "experiment=digits_plain"], "algorithms=ema replaces batch_augment; +algorithms=ema adds"),
        # No message for entries that are added, kept, replaced on purpose or unknown.
        (["+callbacks=speed_monitor", "~callbacks.progress_bar", "callbacks.speed_monitor.window_size=3"], None),
        (["callbacks=none"], None),
        (["callbacks=[]"], None),
        (["callbacks=none", "+callbacks=speed_monitor"], None),
        (["callbacks=[checkpoint_saver,speed_monitor]"], None),
        (["-m", "algorithms=none,ema"], None),
        (["callbacks=speedmonitor"], None),
        (["callbacks=none", "algorithms=none", "algorithms=ema"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_choice_that_replaces_default_entries_is_reported(typed: list[str], sentence: str | None):
    messages = list(about_replaced(typed, CONF))
    assert len(messages) == (sentence is not None)
    assert all(message.startswith(str(sentence)) for message in messages)


def unknown(*keys: str) -> Exception:
    return NoSuchArgument([f"optimizer.{key}" for key in keys], "no such argument")


@pytest.mark.parametrize(
    ("keys", "typed", "advice"),
    [
        (["a"], ["+optimizer.a=1"], ""),
        (["a"], ["~optimizer", "+optimizer={a: 1}"], ""),
        (["a"], ["optimizer=adamw"], ". It is set in a file: remove it with ~optimizer.a"),
        (
            ["a", "b", "c"],
            ["experiment=mine", "optimizer.b=3"],
            ". It is set in a file: remove it with ~optimizer.a ~optimizer.c",
        ),
    ],
)
def test_an_unknown_argument_set_in_a_file_says_how_to_remove_it(keys: list[str], typed: list[str], advice: str):
    assert explain(unknown(*keys), typed, CONF).message == f"optimizer.a: no such argument{advice}"


def known(error: Exception, **facts: str) -> Exception:
    """Annotate an exception with facts, and return it."""
    annotate(error, **facts)
    return error


IN_Y = {"section": "a.b", "target": "x.Y"}
TOO_SMALL = "size=0: too small"


@pytest.mark.parametrize(
    ("error", "message", "key"),
    [
        (ValueError("plain"), "plain", ""),
        (ValueError(""), "ValueError", ""),
        (ValueError(TOO_SMALL), TOO_SMALL, "size"),
        (ValueError("launch.grace=0: too small"), "launch.grace=0: too small", "launch.grace"),
        (known(ValueError(TOO_SMALL), **IN_Y, argument="size", key="a.b.size"), f"a.b.{TOO_SMALL}", "a.b.size"),
        (known(ValueError(TOO_SMALL), **IN_Y, argument="size"), f"a.b: {TOO_SMALL} (x.Y)", ""),
        (known(ValueError("too small"), **IN_Y), "a.b: too small (x.Y)", ""),
        (known(ValueError("not both"), section="trainer", target="runner.Trainer"), "not both", ""),
        (WrongKey("a.b.size", "too small", "0"), f"a.b.{TOO_SMALL}", "a.b.size"),
        (WrongKey("a.b.size", "no such key"), "a.b.size: no such key", ""),
        (FileNotFoundError(2, "No such file or directory", "/a"), "cannot use '/a': No such file or directory", ""),
        (OSError("made up"), "made up", ""),
    ],
    ids=str,
)
def test_an_error_of_a_constructor_is_named_by_its_full_key(error: Exception, message: str, key: str):
    explained = explain(error, [], CONF)
    assert (explained.message, explained.key) == (message, key)


def test_notes_of_an_error_do_not_change_its_message():
    error = ValueError(TOO_SMALL)
    for note in ("in a.b.size (x.Y)", "raised by 'a' at FIT_START, in epoch 1, after 0 batches"):
        error.add_note(note)
    assert explain(error, [], CONF).message == TOO_SMALL
    with pytest.raises(ValueError), config_errors(Event.FIT_START):
        raise error


@pytest.mark.parametrize("event", [Event.FIT_START, Event.INIT, None])
def test_only_errors_of_the_requested_event_become_wrong_config(event: Event | None):
    error = ValueError(TOO_SMALL)
    add_raiser(error, "inner", Event.EVAL_START)
    add_raiser(error, "outer", event)
    expected = WrongConfig if event is Event.FIT_START else ValueError
    with pytest.raises(expected) as raised, config_errors(Event.FIT_START):
        raise error
    assert getattr(raised.value, "key", "size") == "size"


def test_a_type_error_names_the_line_that_raised_it():
    with pytest.raises(TypeError) as raised:
        None + 1  # type: ignore[operator]  # noqa: B018
    message = explain(known(raised.value, section="model", target="x.Y"), [], CONF).message
    assert message.startswith("model: unsupported operand") and "(x.Y)" in message
    assert f"[{__file__}:" in message


def test_an_unusual_constructor_error_names_its_line_and_how_to_see_the_trace():
    failed = ConstructorFailed("KeyError: 'x'")
    try:
        {}["x"]
    except KeyError as error:
        failed.__cause__ = error
    message = explain(known(failed, section="model", target="x.Y"), [], CONF).message
    assert message.startswith(f"model: KeyError: 'x' (x.Y) [{__file__}:")
    assert message.endswith("; HYDRA_FULL_ERROR=1 shows the traceback")


def test_an_error_in_a_resolver_is_reported_without_the_resolver(tmp_path: Path):
    def read(path: str) -> Any:
        return Path(path).read_text()

    OmegaConf.register_new_resolver("read", read)
    try:
        with pytest.raises(CONFIG_ERRORS) as raised:
            OmegaConf.to_container(OmegaConf.create({"a": f"${{read:{tmp_path}/missing}}"}), resolve=True)
    finally:
        OmegaConf.clear_resolver("read")
    assert explain(raised.value, [], CONF).message == f"a: No such file or directory: '{tmp_path}/missing'"


def test_broken_yaml_is_a_config_error_that_names_the_line(tmp_path: Path):
    with pytest.raises(yaml.YAMLError) as raised:
        yaml.safe_load("a: [1\nb: 2")
    assert isinstance(raised.value, CONFIG_ERRORS)
    assert "line 2" in explain(raised.value, [], CONF).message


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("- override /model: mlp\n- /callbacks: [speed_monitor]", "^experiment/mine: .* put overrides last$"),
        (
            "- mine",
            "^experiment/mine: includes itself through its defaults, .*; remove that entry$",
        ),
        ("- /model: mlp", "^model: a file chooses a second one; .*'override /model: ...' instead$"),
    ],
)
def test_wrong_defaults_of_an_experiment_name_the_fix(tmp_path: Path, defaults: str, message: str):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\ndefaults:\n{defaults}\n")
    command = ["experiment=mine", f"hydra.searchpath=[{tmp_path}]"]
    refused = pytest.raises(WrongConfig, match=message)
    with initialized(CONF), refused, config_errors():
        compose("config", command)
    with pytest.raises(AssertionError), config_errors():
        raise AssertionError("a bug")
    with pytest.raises(RecursionError), config_errors():
        raise RecursionError("a bug")


def test_errors_of_bugs_are_no_config_errors():
    assert not issubclass(AttributeError, CONFIG_ERRORS)
    assert not issubclass(RuntimeError, CONFIG_ERRORS)
    assert not issubclass(KeyError, CONFIG_ERRORS)


@pytest.mark.parametrize("group", ["callbacks", "algorithms"])
def test_the_defaults_read_from_config_yaml_are_those_of_composing(group: str):
    """The shortcut saves composing a second time only to learn which defaults a command replaces."""
    composed = list(_compose_without(group, [f"{group}=none"], CONF)[group])
    assert _usual(group, [f"{group}=none"], CONF) == composed and len(composed) >= 2
    of_recipe = ["experiment=digits_fast", f"{group}=none"]
    assert _usual(group, of_recipe, CONF) == list(_compose_without(group, of_recipe, CONF)[group])


def test_facts_of_a_wrong_config_survive_pickling():
    error = WrongConfig("a=1: no", "a", "a", ("2", "3"), "a=2")
    same = pickle.loads(pickle.dumps(error))
    assert (str(same), same.key, same.at, same.allowed, same.fix) == ("a=1: no", "a", "a", ("2", "3"), "a=2")
