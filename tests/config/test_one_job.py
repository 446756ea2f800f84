"""A command of one job is composed here, once; everything else is left to Hydra."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from runner.cli.catalogue import CONF
from runner.config.composing import VERSION_BASE, initialized
from runner.config.one_job import is_one_job, run_one_job

pytestmark = pytest.mark.usefixtures("own_logging")
SMALL = ("model=mlp", "callbacks=none")


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects the overrides of each composition."""
    overrides_of: list[Any] = []
    with initialized(CONF):
        loader = type(GlobalHydra.instance().config_loader())
    load = loader.load_configuration

    def count(loader: Any, config_name: Any, overrides: Any, *args: Any, **kwargs: Any) -> Any:
        overrides_of.append(list(overrides))
        return load(loader, config_name, overrides, *args, **kwargs)

    monkeypatch.setattr(loader, "load_configuration", count)
    return overrides_of


def test_a_command_is_composed_once(run_here: Any, composed: list[Any]):
    run_here("check", *SMALL, code=0)
    assert composed == [[*SMALL, "hydra.mode=RUN"]]


def test_the_config_equals_that_of_hydra_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    typed = [*SMALL, "seed=3", "+vars.a=1", f"hydra.run.dir={tmp_path}", "hydra.sweep.dir=none"]
    typed += ["+hydra.job.env_set.MINE='yes'"]
    configs: list[Any] = []

    def keep(config: Any) -> None:
        hydra_config: Any = OmegaConf.to_container(HydraConfig.instance().cfg, resolve=True)
        configs.append((OmegaConf.to_container(config, resolve=True), hydra_config))

    run_one_job(keep, typed)
    monkeypatch.setattr(sys, "argv", ["runner", *typed])
    hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")(keep)()
    assert configs[0] == configs[1]


def test_an_error_of_the_task_is_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def fail(config: Any) -> None:
        raise ValueError("seed=3: is odd")

    with pytest.raises(ValueError, match="seed=3: is odd"):
        run_one_job(fail, [*SMALL, f"hydra.run.dir={tmp_path}"])


def test_a_typed_mode_is_left_to_hydra(run_here: Any):
    assert "seed=1" in run_here("check", "hydra.mode=MULTIRUN", "seed=0,1", *SMALL, code=0).out


def test_a_mode_in_a_file_of_the_user_is_left_to_hydra(tmp_path: Path, run_here: Any):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    assert "seed=1" in run_here("check", "experiment=mine", "seed=0,1", *SMALL, code=0).out


def test_no_file_of_conf_sets_the_mode_or_adds_hydra_callbacks():
    for file in CONF.rglob("*.yaml"):
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        assert "mode" not in (content.get("hydra") or {}), file
    callbacks = OmegaConf.load(CONF / "config.yaml").hydra.callbacks
    assert [*callbacks] == ["sweep"], "run_one_job calls no callbacks of Hydra"


@pytest.mark.parametrize(
    "typed",
    [
        *("--config-dir=conf", "-cd", "-m", "--cfg", "hydra.mode=RUN", "hydra={mode: RUN}", "hydra.searchpath=[a]"),
        *("+hydra.callbacks.mine._target_=a.B", "+hydra/callbacks=log_job_return"),
    ],
)
def test_arguments_that_configure_hydra_are_left_to_hydra(typed: str):
    assert not is_one_job(["seed=1", typed])


def test_other_arguments_are_one_job():
    assert is_one_job(["seed=1", "~callbacks.x", "hydra.run.dir=a-b", "hydra/job_logging=none", "run_name=hydra.mode"])
