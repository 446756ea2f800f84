"""Errors as Hydra, OmegaConf and constructors raise them, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from runner.wrong_config import CONFIG_ERRORS, explain

CONF = Path(__file__).resolve().parent.parent / "conf"


@pytest.fixture(autouse=True)
def no_hydra_is_left() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()


def explained(*overrides: str) -> str:
    """What is said of a command that does not compose."""
    with pytest.raises(CONFIG_ERRORS) as raised, initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(overrides))
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return explain(raised.value, overrides, CONF)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=mpl"], "model=mpl: no such choice; did you mean 'mlp'? Allowed: gpt, mlp, resnet8"),
        (["model="], "model=: no such choice; allowed: gpt, mlp, resnet8"),
        (["optimizer.lrr=1"], "optimizer.lrr: optimizer has no key 'lrr'; did you mean 'lr'? Allowed: lr, momentum, "),
        # The allowed keys are those of the chosen optimizer.
        (["optimizer=adam", "optimizer.momentum=1"], "optimizer.momentum: optimizer has no key 'momentum'; allowed: b"),
        (["model.module.x.y=1"], "model.module.x.y: model.module has no key 'x'"),
        (["seed.x=1"], "seed.x: seed is a single value, it has no keys"),
        (["sede=1"], "sede: no key 'sede'; did you mean 'seed'? Allowed: "),
        (["~callbacks.lr_monitor"], "callbacks.lr_monitor: 'lr_monitor' is not part of this run; it is added with +"),
        (["callbacks.lr_monitor.x=1"], "callbacks.lr_monitor.x: 'lr_monitor' is not part of this run"),
        (["callbacks.lr_moniter.x=1"], "callbacks.lr_moniter.x: callbacks has no key 'lr_moniter'"),
        (["~model", "model.x=1"], "model.x: there is no model in this run; choose one with model=<name>"),
        (["~run_name"], "run_name: is null, there is nothing to remove"),
        (["+seed=1"], "+seed: is there already; write seed=... without the +"),
        (["+model=mlp"], "+model: there is one already; write model=... without the +"),
        (
            ["+callbacks=lr_monitor", "+callbacks=speed_monitor"],
            "callbacks: given more than once; for several in one list write",
        ),
        (["seed=1", "model=null"], "model=null: a group takes the name of a choice; allowed: gpt, mlp, resnet8"),
        (["data=3"], "data=3: a group takes the name of a choice; allowed: digits, "),
        (["+algorithms=null"], "+algorithms=null: a group takes the name of a choice; allowed: activation_"),
        (["nonsense"], "nonsense: cannot be read; write key=value"),
        (["seed=1", "+callbacks=[a"], "+callbacks=[a: cannot be read; write key=value"),
        (["seed=${nothing}"], "seed: Interpolation key 'nothing' not found"),
        (["seed=???"], "seed: Missing mandatory value: seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_does_not_compose(overrides: list[str], message: str):
    said = explained(*overrides)
    assert said.startswith(message)
    assert "\n" not in said
    assert "_target_" not in said and "_partial_" not in said


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("plain"), "plain"),
        (ValueError(""), "ValueError"),
        (noted(ValueError("size=0: too small"), "in a.b.size (x.Y)"), "a.b.size=0: too small"),
        (noted(ValueError("size=0: too small"), "in a.b (x.Y)"), "a.b: size=0: too small (x.Y)"),
        (noted(ValueError("too small"), "in a.b (x.Y)"), "a.b: too small (x.Y)"),
        (noted(ValueError("two cannot be combined"), "in trainer (runner.Trainer)"), "two cannot be combined"),
        (noted(ValueError("x"), "raised by someone"), "x"),
        (FileNotFoundError(2, "No such file or directory", "/a"), "cannot use '/a': No such file or directory"),
        (OSError("made up"), "made up"),
    ],
    ids=str,
)
def test_an_error_of_a_constructor(error: Exception, message: str):
    assert explain(error, [], CONF) == message


def test_a_type_error_says_where_it_was_raised():
    """Its message alone seldom says what is wrong."""
    with pytest.raises(TypeError) as raised:
        None + 1  # type: ignore[operator]  # noqa: B018
    said = explain(noted(raised.value, "in model (x.Y)"), [], CONF)
    assert said.startswith("model: unsupported operand") and "(x.Y)" in said
    assert f"[{__file__}:" in said


def test_an_error_of_a_resolver_is_told_without_it(tmp_path: Path):
    def fails(path: str) -> Any:
        return Path(path).read_text()

    OmegaConf.register_new_resolver("fails", fails)
    try:
        with pytest.raises(CONFIG_ERRORS) as raised:
            OmegaConf.to_container(OmegaConf.create({"a": f"${{fails:{tmp_path}/missing}}"}), resolve=True)
    finally:
        OmegaConf.clear_resolver("fails")
    assert explain(raised.value, [], CONF) == f"a: No such file or directory: '{tmp_path}/missing'"


def test_a_torn_yaml_file_is_a_wrong_configuration(tmp_path: Path):
    with pytest.raises(yaml.YAMLError) as raised:
        yaml.safe_load("a: [1\nb: 2")
    assert isinstance(raised.value, CONFIG_ERRORS)
    assert "line 2" in explain(raised.value, [], CONF)


def test_a_fault_of_the_program_is_none_of_the_configuration():
    assert not issubclass(AttributeError, CONFIG_ERRORS)
    assert not issubclass(RuntimeError, CONFIG_ERRORS)
    assert not issubclass(KeyError, CONFIG_ERRORS)
